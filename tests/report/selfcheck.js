// Run inside the page by test_page.py: what a person would see is checked where it is drawn. Adds one element, #selfcheck.
window.addEventListener("load", () => {
  const out = { errors: window.__errors, plots: 0, undrawn: [], overflow: [], clipped: [], contrast: [], behaviour: [] };
  const name = (e) => (e.getAttribute("aria-label") || e.textContent || e.tagName).trim().slice(0, 80);
  const shown = (e) => e.checkVisibility() && !e.closest(".skip, .sr");
  for (const d of document.querySelectorAll("details")) d.open = true;

  for (const plot of document.querySelectorAll("[data-plot]")) {
    out.plots++;
    const box = plot.getBoundingClientRect();
    const marks = plot.tagName === "svg" ? plot.querySelectorAll("circle, rect, path").length : plot.querySelectorAll("tbody td").length;
    const broken = /NaN|undefined|Infinity/.test(plot.outerHTML);
    if (box.width < 60 || box.height < 30 || marks === 0 || broken) out.undrawn.push(`${name(plot)}: ${box.width}x${box.height}, ${marks} marks${broken ? ", NaN" : ""}`);
    if (plot.tagName !== "svg") continue;
    for (const part of plot.querySelectorAll("text, circle, path, line, rect")) {
      const b = part.getBBox();
      if (b.x < -0.5 || b.y < -0.5 || b.x + b.width > plot.viewBox.baseVal.width + 0.5 || b.y + b.height > plot.viewBox.baseVal.height + 0.5)
        out.clipped.push(`${name(plot)}: ${part.tagName} ${name(part)}`);
    }
    const texts = [...plot.querySelectorAll("text")].map((t) => [t, t.getBBox()]);
    for (let i = 0; i < texts.length; i++)
      for (let j = i + 1; j < texts.length; j++) {
        const [a, b] = [texts[i][1], texts[j][1]];
        if (a.x + 1 < b.x + b.width && b.x + 1 < a.x + a.width && a.y + 4 < b.y + b.height && b.y + 4 < a.y + a.height)
          out.clipped.push(`${name(plot)}: ${name(texts[i][0])} over ${name(texts[j][0])}`);
      }
  }

  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) out.overflow.push(`page is ${document.documentElement.scrollWidth} wide`);
  for (const e of document.querySelectorAll("body *")) {
    if (!shown(e) || e.closest("svg *, .scroll *")) continue;
    const box = e.getBoundingClientRect();
    if (box.right > width + 0.5 || box.left < -0.5) out.overflow.push(`${e.tagName} ${name(e)}: ${box.left} to ${box.right}`);
  }
  for (const theme of ["light", "dark"]) {
    document.documentElement.dataset.theme = theme; // once per theme: every change styles the whole page anew
    const seen = new Set(); // equal cells of a large table need one look
    for (const e of document.querySelectorAll(".heatmap td, .badge, .tile b, small, .dim, .ok, .bad")) {
      const key = `${e.className} ${e.getAttribute("style")} ${e.parentElement.className} ${e.closest("section")?.className}`;
      if (seen.has(key) || !shown(e) || e.closest(".was, .is-stale")) continue;
      seen.add(key);
      const ratio = contrast(e);
      if (ratio < 4.5) out.contrast.push(`${theme} ${e.className} ${name(e)}: ${ratio.toFixed(2)}`);
    }
  }
  delete document.documentElement.dataset.theme;
  document.querySelectorAll("table.sortable.rows").forEach((t) => out.behaviour.push(behave(t)));
  const button = document.getElementById("theme"), before = getComputedStyle(document.body).backgroundColor;
  button.click();
  out.themed = getComputedStyle(document.body).backgroundColor !== before;
  out.ages = [...document.querySelectorAll("time")].every((t) => /^\d+ (min|h|d)$/.test(t.textContent));
  out.unlabelled = [...document.querySelectorAll("svg, input, button, [role=region]")].filter((e) =>
    !(e.getAttribute("aria-label") || e.textContent.trim() || (e.labels && e.labels.length))).map((e) => e.outerHTML.slice(0, 80));
  for (const key of ["undrawn", "overflow", "clipped", "contrast"]) out[key] = [...new Set(out[key])].slice(0, 20);
  const pre = document.createElement("pre");
  pre.id = "selfcheck";
  pre.textContent = JSON.stringify(out);
  document.body.append(pre);
});

function rgba(text) {
  const v = text.match(/-?[\d.]+(e-?\d+)?/g).map(Number);
  const rgb = text.startsWith("color(") ? v.slice(0, 3) : v.slice(0, 3).map((x) => x / 255);
  return [...rgb, v.length > 3 ? v[3] : 1];
}
function contrast(e) {
  let opacity = 1, back = [1, 1, 1];
  for (let n = e; n; n = n.parentElement) opacity *= Number(getComputedStyle(n).opacity);
  for (let n = e; n; n = n.parentElement) {
    const c = rgba(getComputedStyle(n).backgroundColor);
    if (c[3] > 0.5) { back = c; break; }
  }
  const ink = rgba(getComputedStyle(e).color).slice(0, 3).map((x, i) => x * opacity + back[i] * (1 - opacity));
  const light = (c) => [0.2126, 0.7152, 0.0722].reduce((s, w, i) => s + w * (c[i] <= 0.04045 ? c[i] / 12.92 : ((c[i] + 0.055) / 1.055) ** 2.4), 0);
  const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
function behave(table) {
  const heads = [...table.tHead.rows[0].cells], column = heads.findIndex((h) => h.textContent.trim() === "ms");
  const values = () => [...table.tBodies[0].rows].filter((r) => !r.hidden).map((r) => Number(r.cells[column].dataset.v));
  const ordered = (v, sign) => v.every((x, i) => i === 0 || sign * (x - v[i - 1]) >= 0);
  const all = values().length;
  heads[column].querySelector("button").click();
  const up = ordered(values(), 1);
  heads[column].querySelector("button").click();
  const down = ordered(values(), -1);
  const field = document.querySelector(`input[data-table="${table.id}"]`);
  field.value = "H96 slow";
  field.dispatchEvent(new Event("input"));
  const kept = [...table.tBodies[0].rows].filter((r) => !r.hidden);
  const right = kept.every((r) => r.textContent.includes("h96") && r.textContent.includes("slow"));
  field.value = "";
  field.dispatchEvent(new Event("input"));
  return { up, down, filtered: right && kept.length > 0 && kept.length < all, restored: values().length === all };
}
