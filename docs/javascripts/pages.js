// The copy button of a diff copies the new script; tables of many columns are stacked on
// a phone, each cell with the name of its column.
document$.subscribe(() => {
  for (const block of document.querySelectorAll("article .highlight:has(.gi)")) {
    const lines = block.querySelector("code").innerText.split("\n");
    const added = lines.filter((line) => !line.startsWith("-"));
    block.dataset.copy = added.map((line) => line.slice(1)).join("\n");
  }
  for (const table of document.querySelectorAll("article table:not([class])")) {
    const names = [...table.querySelectorAll("thead th")].map((th) => th.innerText);
    if (names.length < 5) continue;
    table.dataset.stacked = "";
    for (const cell of table.querySelectorAll("tbody td")) {
      cell.dataset.column = names[cell.cellIndex] ?? "";
    }
  }
});
