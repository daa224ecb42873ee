// The page: choosing settings and cells, the theme, the rows as CSV. All text goes through textContent.
"use strict";

lipscope.element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

lipscope.chosen = { setting: 0, cells: {}, linear: false, groups: {} };

lipscope.showSetting = (index) => {
  lipscope.chosen.setting = index;
  for (const part of document.querySelectorAll(".setting")) {
    const shown = Number(part.dataset.setting) === index;
    part.hidden = !shown;
    for (const id of ["where", "why", "tokens"]) {
      const section = part.querySelector(`section[aria-labelledby="${id}-${part.dataset.setting}"]`);
      if (shown) section.id = id; else section.removeAttribute("id");
    }
  }
  const part = document.querySelector(`.setting[data-setting="${index}"]`);
  if (!part) return undefined;
  const about = lipscope.data.settings[index];
  const cell = lipscope.chosen.cells[index] ?? about.worst;
  return lipscope.showCell(part, Math.min(cell, about.cells.length - 1), false);
};

lipscope.showCell = (part, index, moved = true) => {
  const setting = lipscope.data.settings[Number(part.dataset.setting)];
  const cell = setting.cells[index];
  lipscope.chosen.cells[part.dataset.setting] = index;
  for (const button of part.querySelectorAll(".heat button")) {
    const same = Number(button.dataset.cell) === index;
    button.setAttribute("aria-pressed", same);
    button.tabIndex = -1;
  }
  const own = part.querySelector(`.heat button[data-cell="${index}"]`) || part.querySelector(".heat button");
  if (own && !(moved && part.contains(document.activeElement) && document.activeElement.closest(".heat"))) own.tabIndex = 0;
  else if (own) document.activeElement.tabIndex = 0;
  part.querySelector("[data-where]").textContent = cell.where;
  part.querySelector("[data-now]").textContent = `${cell.where} ↓`;
  if (moved) history.replaceState(null, "", `#${lipscope.data.settings.length > 1 ? `s${Number(part.dataset.setting) + 1}` : ""}${cell.link}`);
  const facts = part.querySelector("[data-facts]");
  facts.replaceChildren(...cell.facts.map(([name, value]) => {
    const line = lipscope.element("div");
    line.append(lipscope.element("dt", name), lipscope.element("dd", value));
    return line;
  }));
  const table = part.querySelector("[data-table]");
  table.replaceChildren(...cell.table.map((row, k) => {
    const line = lipscope.element("tr");
    line.append(...row.map((value) => lipscope.element(k ? "td" : "th", value)));
    return line;
  }));
  lipscope.showTokens(part, cell);
  return lipscope.drawGrowth(part);
};

lipscope.showTokens = (part, cell) => {
  const line = part.querySelector("[data-tokens]");
  line.replaceChildren();
  if (cell.view === null) {
    line.append("Its worst tokens were not measured. ");
    if (cell.measure) line.append("To see them: ", lipscope.element("code", cell.measure));
    return;
  }
  line.append(`Worst tokens at n = ${cell.at}: `);
  for (const [token, share] of cell.tokens) line.append(lipscope.element("bdi", `“${token}”`), ` ${share}, `);
  const link = lipscope.element("a", "see the token view", { href: "#tokens" });
  line.append(link, ".");
  lipscope.showView(part, cell.view);
};

lipscope.showView = (part, index) => {
  const select = part.querySelector("[data-views]");
  if (select) select.value = String(index);
  for (const view of part.querySelectorAll(".view")) view.hidden = Number(view.dataset.view) !== index;
};

// #L4H10, or #s2L4H10 where there are several settings, is a place.
lipscope.follow = () => {
  const [, number, link] = location.hash.match(/^#(?:s(\d+))?(L\d+(?:H\d+)?)$/) || [];
  const places = lipscope.data.settings.map((setting) => setting.cells.findIndex((cell) => cell.link === link));
  const wanted = number ? Number(number) - 1 : places.findIndex((place) => place >= 0);
  if (!(places[wanted] >= 0)) return false;
  lipscope.chosen.setting = wanted;
  lipscope.chosen.cells[wanted] = places[wanted];
  return true;
};

lipscope.reveal = () => {
  const part = document.querySelector(".setting:not([hidden])");
  part.querySelector(innerWidth < 960 ? ".detail" : '.heat [aria-pressed="true"]').scrollIntoView({ block: "center" });
};

lipscope.drawGrowth = (part) => {
  const setting = lipscope.data.settings[Number(part.dataset.setting)];
  const cell = setting.cells[lipscope.chosen.cells[part.dataset.setting]];
  const { linear, groups } = lipscope.chosen;
  return lipscope.draw(part.querySelector("[data-growth]"), cell.chart, { linear, groups: { ...groups } });
};

lipscope.arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

lipscope.move = (event) => {
  const step = lipscope.arrows[event.key];
  const button = event.target.closest(".heat button");
  if (!step || !button) return;
  event.preventDefault();
  const rows = [...button.closest("tbody").rows];
  let row = rows.indexOf(button.closest("tr"));
  let column = button.closest("td").cellIndex;
  for (;;) {
    row += step[0];
    column += step[1];
    const cell = rows[row]?.cells[column];
    if (!cell || column < 1) return;
    const next = cell.querySelector("button");
    if (next) {
      button.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
      return;
    }
  }
};

lipscope.csv = () => {
  const rows = JSON.parse(document.getElementById("rows").textContent);
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    const text = String(value);
    return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  };
  const columns = rows.columns.map(({ same, words, places, values }) => {
    if (values) return (k) => values[k];
    if (words) return (k) => words[places[k]];
    return () => same;
  });
  const lines = [rows.columns.map((column) => quoted(column.name)).join(",")];
  for (let k = 0; k < rows.count; k += 1) lines.push(columns.map((value) => quoted(value(k))).join(","));
  return `${lines.join("\n")}\n`;
};

lipscope.download = () => {
  const link = lipscope.element("a", undefined, { download: "rows.csv" });
  link.href = URL.createObjectURL(new Blob([lipscope.csv()], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

lipscope.setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme-name").textContent = theme;
  try { localStorage.setItem("lipscope-theme", theme); } catch { /* private windows */ }
  lipscope.redraw();
};

// Once: handlers on what stays when a live report replaces its content.
lipscope.listen = () => {
  const content = document.getElementById("content");
  content.addEventListener("click", (event) => {
    const part = event.target.closest(".setting");
    const cell = event.target.closest("[data-cell]");
    if (part && cell) lipscope.showCell(part, Number(cell.dataset.cell));
    const scale = event.target.closest("[data-scale]");
    if (scale) {
      lipscope.chosen.linear = !lipscope.chosen.linear;
      lipscope.syncTools();
      lipscope.drawGrowth(part);
    }
    if (event.target.id === "download") lipscope.download();
    const show = event.target.closest("[data-show]");
    if (show) {
      lipscope.chosen.setting = Number(show.dataset.show);
      lipscope.show();
      document.getElementById("summary").scrollIntoView();
    }
  });
  content.addEventListener("change", (event) => {
    const part = event.target.closest(".setting");
    if (event.target.id === "setting") lipscope.showSetting(Number(event.target.value));
    if (event.target.matches("[data-views]")) lipscope.showView(part, Number(event.target.value));
    if (event.target.matches("[data-group]")) {
      lipscope.chosen.groups[event.target.dataset.group] = event.target.checked;
      lipscope.syncTools();
      lipscope.drawGrowth(part);
    }
  });
  content.addEventListener("keydown", lipscope.move);
  document.getElementById("theme").addEventListener("click", () => {
    const order = ["auto", "light", "dark"];
    lipscope.setTheme(order[(order.indexOf(document.documentElement.dataset.theme) + 1) % 3]);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lipscope.redraw);
  addEventListener("hashchange", () => {
    if (!lipscope.follow()) return;
    lipscope.show();
    lipscope.reveal();
  });
};

lipscope.complete = () => {
  for (const part of document.querySelectorAll(".setting")) {
    const number = Number(part.dataset.setting);
    lipscope.showCell(part, lipscope.chosen.cells[number] ?? lipscope.data.settings[number].worst, false);
    for (const view of part.querySelectorAll(".view")) view.hidden = false;
  }
};

lipscope.syncTools = () => {
  for (const button of document.querySelectorAll("[data-scale]")) {
    button.setAttribute("aria-pressed", !lipscope.chosen.linear);
    button.textContent = lipscope.chosen.linear ? "linear" : "logarithmic";
  }
  for (const box of document.querySelectorAll("[data-group]")) box.checked = lipscope.chosen.groups[box.dataset.group] !== false;
};

// Again whenever the content is new.
lipscope.show = () => {
  lipscope.syncTools();
  const select = document.getElementById("setting");
  const last = lipscope.data.settings.length - 1;
  const setting = Math.min(lipscope.chosen.setting, last);
  if (select) select.value = String(setting);
  if (last >= 0) lipscope.showSetting(setting)?.then(() => performance.mark("lipscope-shown"));
  for (const place of document.querySelectorAll("[data-chart]")) lipscope.watcher.observe(place);
};

(() => {
  let theme = "auto";
  try { theme = localStorage.getItem("lipscope-theme") || "auto"; } catch { /* private windows */ }
  if (!["auto", "light", "dark"].includes(theme)) theme = "auto";
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme-name").textContent = theme;
  lipscope.listen();
  const linked = lipscope.follow();
  lipscope.show();
  if (linked) lipscope.reveal();
})();
