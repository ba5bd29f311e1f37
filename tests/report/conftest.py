import pytest

from ladder import report, stats
from tests.report.synthetic import Plan, make, stale_of


@pytest.fixture(autouse=True)
def quick_intervals(monkeypatch):
    """What is laid out does not depend on how finely the intervals are resampled."""
    monkeypatch.setattr(stats, "RESAMPLES", 100)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """(ladder, plan, records, stale) of a plan; each plan is made once."""
    known = {}

    def build(**plan):
        key = repr(sorted(plan.items()))
        if key not in known:
            p = Plan(**plan)
            ladder = make(tmp_path_factory.mktemp("ladder"), p)
            records, problems = report.load(ladder)
            assert problems == []
            known[key] = ladder, p, records, stale_of(p)
        return known[key]

    return build
