"""Scores of the 16 x 16 diagonal blocks where no bound on the gate is known (prep_sm90.py, phase A1').

A pair (i, j), i > j, parts at level s, the highest bit in which i and j differ. With m the first row of i's half at that
level, its decay 2^(L_i - L_j) is the product of 2^(L_i - L_{m-1}) and 2^(L_{m-1} - L_j), both at most 1: one factor
per row, level and channel. A level's product is taken over the whole block and kept where pairs part at that level.
"""

from __future__ import annotations

from cutlass import Float32, Int32, select_

from . import ptx

BLOCK, ROW, CHUNK = 16, 128, 64
TILE = CHUNK * ROW


def diagonal_scores(cfg, x):
    """(q scores, k scores) of diagonal block warp % 4, 2 column halves x 4 registers each. Of 8 warps, the first four do
    levels 8 and 4, the others 2, 1 and i = j (entries of other levels mean nothing); 4 warps do them all."""
    levels = [Int32(s) for s in (8, 4, 2, 1)]
    if cfg.warps == 8:
        early = (x.warp >> 2) == 0
        levels = [select_(early, levels[n], levels[n + 2]) for n in range(2)]
    scores = _keep(cfg, x, Int32(0), Int32(1), None, _level(cfg, x, None))
    for s in levels:
        scores = _keep(cfg, x, s, 2 * s, scores, _level(cfg, x, s))
    return scores


def put(cfg, x, scores) -> None:
    """Write what `diagonal_scores` left of the warp's block to Aqk and L: with 8 warps, the levels it has done."""
    block = x.warp & 3

    def done(i, j):  # j even: i ^ j and i ^ (j + 1) lie on the same side of 4
        if cfg.warps == 4:
            return Int32(1)
        return select_(((i ^ j) >= 4) == ((x.warp >> 2) == 0), Int32(1), Int32(0))

    for n in range(2):
        for half in range(2):
            i, j = 8 * half + (x.lane >> 2), n * 8 + 2 * (x.lane & 3)
            value = [select_(j + r <= i, scores[0][n][2 * half + r] * x.scale, Float32(0.0)) for r in range(2)]
            word = ptx.pack(value[0], value[1], cfg.pair)
            ptx.sts_if(done(i, j), 0, cfg.word(x, x.kd, block, half, 2 * block + n), word)
        cfg.put_k_diagonal(x, scores[1][n], block, n, done)


def _zeros():
    return [[Float32(0.0)] * 4 for _ in range(2)]


def _level(cfg, x, s):
    """Scores of the whole block with level s's factors (s in a register), or with none."""
    lane, block = x.lane, x.warp & 3
    rows = (block * BLOCK + (lane & 15)) * ROW
    row = [lane >> 2, (lane >> 2) + 8]
    local = x.local + block * BLOCK * cfg.pitch + (lane & 3) * 8
    if s is not None:
        later = [(row[h] & s) != 0 for h in range(2)]
        own = [local + row[h] * cfg.pitch for h in range(2)]
        anchor = [local + ((row[h] & (-2 * s)) + s - 1) * cfg.pitch for h in range(2)]
    q, k = _zeros(), _zeros()
    for kk in range(cfg.K // 16):
        off = (kk // 4) * TILE
        a_q, a_k = (list(ptx.ldmatrix(t + rows + x.swizzled[kk % 4], off)) for t in (x.q, x.k))
        for r in range(4) if s is not None else ():  # fragment register: row half r % 2, channel half r // 2
            h, at = r % 2, kk * 64 + (r // 2) * 32
            mine, base = ptx.lds_vec(own[h], 2, at, Float32), ptx.lds_vec(anchor[h], 2, at, Float32)
            f = [ptx.ex2(select_(later[h], mine[j] - base[j], base[j] - mine[j])) for j in range(2)]
            for side in (a_q, a_k):
                low, high = ptx.unpack(side[r], cfg.pair)
                side[r] = ptx.pack(low * f[0], high * f[1], cfg.pair)
        for n in range(2):
            q[n] = ptx.mma(q[n], a_q, (a_k[n], a_k[n + 2]), cfg.pair)
            k[n] = ptx.mma(k[n], a_k, (a_k[n], a_k[n + 2]), cfg.pair)
    return q, k


def _keep(cfg, x, low, high, old, new):
    """`new`, row and column norms applied, where low <= i ^ j < high; `old` (or zero) elsewhere."""
    block = (x.warp & 3) * BLOCK
    old = old or (_zeros(), _zeros())
    out = _zeros(), _zeros()
    for side in range(2):
        for n in range(2):
            for r in range(4):
                i, j = (x.lane >> 2) + 8 * (r // 2), 8 * n + 2 * (x.lane & 3) + r % 2
                value = new[side][n][r]
                if cfg.l2norm:
                    value = value * ptx.lds(x.norms + (block + i) * 4, side * CHUNK * 4, Float32)
                    value = value * ptx.lds(x.norms + (block + j) * 4, CHUNK * 4, Float32)
                apart = i ^ j
                kept = select_(apart < high, value, old[side][n][r])
                out[side][n][r] = select_(apart >= low, kept, old[side][n][r])
    return out
