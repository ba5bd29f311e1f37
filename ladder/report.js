"use strict";
// Ages grow after the page was made: count them from now.
for (const t of document.querySelectorAll("time[datetime]")) {
  const minutes = Math.max(0, Math.floor((Date.now() - Date.parse(t.dateTime)) / 60000));
  if (Number.isNaN(minutes)) continue;
  t.textContent = minutes < 60 ? `${minutes} min` : minutes < 2880 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} d`;
}
// Dark or light: the system's choice until the button is pressed.
const button = document.getElementById("theme");
const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const label = () => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-pressed", String(dark())); };
button.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); });
label();
// Sort a table by the column whose head is pressed; by numbers where both cells are numbers.
const value = (row, i) => row.cells[i].dataset.v ?? row.cells[i].textContent.trim();
const compare = (a, b) => {
  if (a === "" || b === "") return (a === "") - (b === "");
  return isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
};
for (const head of document.querySelectorAll("table.sortable thead th")) {
  head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0], i = head.cellIndex;
    body.append(...[...body.rows].sort((a, b) => (down ? -1 : 1) * compare(value(a, i), value(b, i))));
  });
}
// Show only rows that hold every word typed.
for (const field of document.querySelectorAll("input.find")) {
  const rows = [...document.getElementById(field.dataset.table).tBodies[0].rows];
  const count = field.parentElement.querySelector(".count");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((w) => text.includes(w));
    }
    count.textContent = `${rows.filter((r) => !r.hidden).length} of ${rows.length} rows`;
  });
}
