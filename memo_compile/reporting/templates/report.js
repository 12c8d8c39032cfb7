(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const show = (lines, event) => {
    tip.replaceChildren(...lines.map((line, index) => {
      const part = document.createElement(index ? "div" : "b");
      part.textContent = line;
      return part;
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 14 + box.width > innerWidth ? event.clientX - 14 - box.width : event.clientX + 14;
    const y = event.clientY + 14 + box.height > innerHeight ? event.clientY - 14 - box.height : event.clientY + 14;
    tip.style.left = `${Math.max(8, Math.min(x, innerWidth - box.width - 8))}px`;
    tip.style.top = `${Math.max(8, y)}px`;
  };
  const hide = () => { tip.hidden = true; };
  for (const plot of document.querySelectorAll("[data-chart]")) {
    const chart = data[plot.dataset.chart];
    const { rows, texts } = plot.dataset.part ? chart[plot.dataset.part] : chart;
    const hit = plot.querySelector(".hit");
    const leave = () => { hide(); hit.style.display = "none"; };
    const move = (event) => {
      const frame = plot.getBoundingClientRect();
      const x = (event.clientX - frame.left) / frame.width * 1000;
      const y = (event.clientY - frame.top) / frame.height * 400;
      const reach = 1000 / frame.width * 1.5;
      const over = (row, slack) => x >= row[0] - slack && x < row[0] + row[2] + slack
        && y >= row[1] - slack && y < row[1] + row[3] + slack;
      const row = rows.find((one) => over(one, 0)) || rows.find((one) => over(one, reach));
      if (!row) { leave(); return; }
      hit.style.display = "block";
      hit.style.left = `${row[0] / 10}%`;
      hit.style.width = `${row[2] / 10}%`;
      hit.style.top = `${row[1] / 4}%`;
      hit.style.height = `${row[3] / 4}%`;
      show(row.slice(4).map((index) => texts[index]), event);
    };
    plot.addEventListener("pointermove", move);
    plot.addEventListener("pointerdown", move);
    plot.addEventListener("pointerleave", leave);
  }
  for (const dot of document.querySelectorAll("[data-tip]")) {
    const lines = dot.dataset.tip.split("|");
    const at = (event) => show(lines, event);
    const focus = () => {
      const box = dot.getBoundingClientRect();
      show(lines, { clientX: box.right, clientY: box.bottom });
    };
    dot.addEventListener("pointermove", at);
    dot.addEventListener("pointerleave", hide);
    dot.addEventListener("focus", focus);
    dot.addEventListener("blur", hide);
  }
  const table = document.getElementById("table");
  if (table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const key = (row, column) => {
      const cell = row.cells[column];
      return cell.dataset.sort === undefined ? cell.textContent.trim() : Number(cell.dataset.sort);
    };
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") !== "ascending";
      for (const one of heads) one.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a, column), key(b, column)));
      body.replaceChildren(...rows);
    }));
    const filter = document.getElementById("filter");
    const shown = document.getElementById("shown");
    filter.addEventListener("input", () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        count += !row.hidden;
      }
      shown.textContent = words.length ? `${count} of ${body.rows.length} rows` : "";
    });
  }
  const buttons = document.querySelectorAll("[data-by]");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const by = button.dataset.by;
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      const map = document.querySelector(".map");
      map.classList.toggle("by-role", by === "role");
      map.classList.toggle("by-layer", by === "layer");
      for (const legend of document.querySelectorAll("[data-legend]")) {
        legend.hidden = legend.dataset.legend !== by;
      }
    });
  }
})();
