// Charts: from the page's compact data to Plotly, in the colours of the theme, drawn when they come near the screen.
"use strict";
const lipscope = { data: JSON.parse(document.getElementById("data").textContent), drawn: new Map() };

lipscope.theme = () => {
  const chosen = document.documentElement.dataset.theme;
  if (chosen !== "auto") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
};

// Plotly reads some tags in labels; names of models and tokens are text, whatever they look like.
lipscope.plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// "@role" becomes the theme's colour, "@role/0.2" the same, transparent.
lipscope.coloured = (value, palette) => {
  if (typeof value === "string" && value.startsWith("@")) {
    const [role, alpha] = value.slice(1).split("/");
    const hex = palette[role];
    if (alpha === undefined) return hex;
    const channels = [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
    return `rgba(${channels.join(",")},${alpha})`;
  }
  if (Array.isArray(value)) return value.map((entry) => lipscope.coloured(entry, palette));
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, lipscope.coloured(entry, palette)]));
  }
  return value;
};

lipscope.paper = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return { ink: of("--ink"), quiet: of("--quiet"), line: of("--line"), panel: of("--panel"), font: getComputedStyle(document.body).fontFamily };
};

lipscope.layout = (paper) => ({
  paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
  font: { family: paper.font, size: 12.5, color: paper.ink },
  margin: { l: 58, r: 12, t: 8, b: 48 },
  hoverlabel: { bgcolor: paper.panel, bordercolor: paper.quiet, font: { color: paper.ink, family: paper.font }, align: "left" },
});

lipscope.axis = (paper, about, log) => ({
  title: { text: lipscope.plain(about.label), standoff: 8, font: { size: 12.5, color: paper.quiet } },
  type: log ? "log" : "linear", gridcolor: paper.line, linecolor: paper.line, zeroline: false, automargin: true,
  tickfont: { color: paper.quiet }, exponentformat: "power", separatethousands: false,
});

lipscope.spec = (panel, options) => {
  const paper = lipscope.paper();
  const palette = lipscope.data.palettes[lipscope.theme()];
  const shown = options.groups || {};
  const traces = panel.traces.filter((trace) => shown[lipscope.data.looks[trace.look].group] !== false).map((trace) => {
    const { group, ...look } = lipscope.coloured(lipscope.data.looks[trace.look], palette);
    const made = { ...look, meta: { far: trace.far === true }, x: trace.x, y: trace.y, name: lipscope.plain(trace.name), legendgroup: lipscope.plain(trace.name) };
    if (trace.text) made.text = trace.text.map(lipscope.plain);
    if (trace.high) made.error_y = { ...look.error_y, array: trace.high, arrayminus: trace.low };
    return made;
  });
  const linear = options.linear === true;
  const layout = lipscope.layout(paper);
  layout.xaxis = lipscope.axis(paper, panel.x, panel.x.log && !linear);
  layout.yaxis = lipscope.axis(paper, panel.y, panel.y.log && !linear);
  if (panel.x.log && !linear && !panel.x.ticks.length) lipscope.logTicks(layout.xaxis, traces.map((trace) => ({ y: trace.x })));
  if (panel.x.ticks.length) Object.assign(layout.xaxis, { tickvals: panel.x.ticks, ticktext: panel.x.names.map(lipscope.plain) });
  if (panel.y.log && !linear) lipscope.logTicks(layout.yaxis, traces);
  else if (panel.y.zero) layout.yaxis.rangemode = "tozero";
  lipscope.breakAxis(traces, layout);
  layout.showlegend = traces.filter((trace) => trace.showlegend !== false).length > 1;
  layout.legend = { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, xanchor: "left", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)" };
  return { traces, layout };
};

// Numbers on a logarithmic axis: powers of ten, or 1, 2, 5, or even steps, by how much is in view (charts.log_ticks).
lipscope.logTicks = (axis, traces) => {
  const heights = traces.flatMap((trace) => trace.y.concat(trace.error_y?.array ? trace.y.map((y, k) => y + trace.error_y.array[k]) : []));
  const seen = heights.filter((y) => y > 0);
  if (!seen.length) return;
  const [low, high] = [Math.min(...seen) / 1.05, Math.max(...seen) * 1.05];
  const inView = (values) => values.filter((value) => low <= value && value <= high);
  const powers = Array.from({ length: 640 }, (_, k) => k - 320).filter((k) => k >= Math.floor(Math.log10(low)) && k <= Math.log10(high));
  let ticks = inView(powers.map((k) => 10 ** k));
  if (ticks.length > 7) ticks = ticks.filter((_, k) => k % Math.ceil(ticks.length / 6) === 0);
  if (ticks.length < 4) ticks = inView(powers.flatMap((k) => [1, 2, 5].map((m) => m * 10 ** k)));
  if (ticks.length < 3) {
    const unit = 10 ** Math.floor(Math.log10((high - low) / 4));
    const even = [10, 5, 2, 1].map((m) => Array.from({ length: 50 }, (_, k) => (Math.ceil(low / (m * unit)) + k) * m * unit));
    ticks = even.map(inView).find((values) => values.length > 2) || ticks;
  }
  const name = (value) => {
    if (value < 1e6 && value >= 1e-4) return String(Number(value.toPrecision(4)));
    const [digits, power] = value.toExponential(3).split("e");
    return `${Number(digits) === 1 ? "" : `${Number(digits)}·`}10<sup>${Number(power)}</sup>`;
  };
  Object.assign(axis, { tickvals: ticks, ticktext: ticks.map(name) });
};

// Bounds that lie far above everything else (Panel.far) get a part of the axis of their own.
lipscope.breakAxis = (traces, layout) => {
  const far = traces.filter((trace) => trace.meta.far);
  const near = traces.filter((trace) => !trace.meta.far);
  if (!far.length || !near.length) return;
  for (const trace of far) trace.yaxis = "y2";
  layout.yaxis2 = { ...layout.yaxis, title: { ...layout.yaxis.title, text: "bounds" }, domain: [0.72, 1], rangemode: "normal" };
  layout.yaxis.domain = [0, 0.66];
  if (layout.yaxis.type !== "log") return;
  lipscope.logTicks(layout.yaxis2, far);
  lipscope.logTicks(layout.yaxis, near);
};

lipscope.matrix = (panel) => {
  const paper = lipscope.paper();
  const layout = lipscope.layout(paper);
  const axis = (names, label) => ({
    gridcolor: paper.line, zeroline: false, automargin: true, showgrid: false,
    tickfont: { size: names.length > 36 ? 8 : 10, color: paper.quiet }, title: { text: lipscope.plain(label), font: { size: 12.5, color: paper.quiet } },
    ...(names.length <= 64 ? { tickvals: names.map((_, k) => k), ticktext: names.map(lipscope.plain) } : {}),
  });
  layout.xaxis = { ...axis(panel.columns, panel.x.label), tickangle: -60 };
  layout.yaxis = { ...axis(panel.rows, panel.y.label), autorange: "reversed" };
  const words = (i, j) => panel.text ? panel.text[i][j] : `‖∂out_${i}/∂x_${j}‖ = ${panel.z[i][j].toPrecision(3)}: moving ${panel.columns[j]} moves ${panel.rows[i]}`;
  const text = panel.z.map((row, i) => row.map((_, j) => lipscope.plain(words(i, j))));
  const trace = { type: "heatmap", z: panel.z, text, hovertemplate: "%{text}<extra></extra>", colorscale: "Viridis", colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: paper.quiet } } };
  return { traces: [trace], layout };
};

// One panel of a chart; charts of a report's cells have one.
lipscope.draw = (place, chart, options = {}) => {
  lipscope.drawn.set(place, { chart, options });
  const panel = chart.panels[place.dataset.panel ?? 0];
  const made = panel.z ? lipscope.matrix(panel) : lipscope.spec(panel, options);
  if (chart.panels.length === 1) place.setAttribute("aria-label", chart.words);
  const config = { responsive: true, displayModeBar: false };
  return Plotly.react(place, made.traces, made.layout, config);
};

lipscope.redraw = () => {
  for (const [place, { chart, options }] of lipscope.drawn) {
    if (place.offsetParent) {
      lipscope.draw(place, chart, options);
      continue;
    }
    // Gone, or hidden: without a width it is drawn when it is seen again.
    Plotly.purge(place);
    lipscope.drawn.delete(place);
    if (place.dataset.chart) lipscope.watcher.observe(place);
  }
};

lipscope.watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    lipscope.watcher.unobserve(entry.target);
    const chart = lipscope.data.charts[entry.target.dataset.chart];
    if (chart) lipscope.draw(entry.target, chart);
  }
}, { rootMargin: "400px" });

// Paper shows everything, in light colours and at its own width; style.css has the class. A page may have more to complete.
lipscope.complete = () => {};
addEventListener("beforeprint", () => {
  const root = document.documentElement;
  const hidden = [...document.querySelectorAll("main [hidden]")];
  lipscope.screen = { hidden, theme: root.dataset.theme };
  root.dataset.theme = "light";
  root.classList.add("printing");
  for (const part of hidden) part.hidden = false;
  lipscope.complete();
  for (const place of document.querySelectorAll("[data-chart]")) lipscope.draw(place, lipscope.data.charts[place.dataset.chart]);
});
addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = lipscope.screen.theme;
  document.documentElement.classList.remove("printing");
  for (const part of lipscope.screen.hidden) part.hidden = true;
  lipscope.redraw();
});
