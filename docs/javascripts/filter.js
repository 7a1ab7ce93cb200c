// Tables whose first column is "framework" get a choice of frameworks above.
document$.subscribe(() => {
  const tables = [...document.querySelectorAll("article table")].filter(
    (table) => table.querySelector("th")?.innerText.trim() === "framework"
  );
  if (tables.length === 0) return;
  const rows = tables.flatMap((table) => [...table.querySelectorAll("tbody tr")]);
  const nameOf = (row) => row.cells[0].innerText.trim();
  const label = document.createElement("label");
  label.textContent = "Show ";
  const choice = label.appendChild(document.createElement("select"));
  for (const name of ["all frameworks", ...new Set(rows.map(nameOf))]) {
    choice.add(new Option(name));
  }
  choice.addEventListener("change", () => {
    for (const row of rows) {
      row.hidden = choice.selectedIndex > 0 && nameOf(row) !== choice.value;
    }
  });
  const paragraph = document.createElement("p");
  paragraph.append(label);
  (tables[0].closest(".md-typeset__scrollwrap") ?? tables[0]).before(paragraph);
});
