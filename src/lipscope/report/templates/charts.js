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

lipscope.spec = (chart, options) => {
  const paper = lipscope.paper();
  const palette = lipscope.data.palettes[lipscope.theme()];
  const shown = options.groups || {};
  const traces = chart.traces.filter((trace) => shown[lipscope.data.looks[trace.look].group] !== false).map((trace) => {
    const { group, ...look } = lipscope.coloured(lipscope.data.looks[trace.look], palette);
    const made = { ...look, meta: group, x: trace.x, y: trace.y, name: lipscope.plain(trace.name), legendgroup: lipscope.plain(trace.name) };
    if (trace.text) made.text = trace.text.map(lipscope.plain);
    if (trace.high) made.error_y = { ...look.error_y, array: trace.high, arrayminus: trace.low };
    return made;
  });
  const linear = options.linear === true;
  const layout = lipscope.layout(paper);
  layout.xaxis = lipscope.axis(paper, chart.x, chart.x.log && !linear);
  layout.yaxis = lipscope.axis(paper, chart.y, chart.y.log && !linear);
  if (chart.x.log && !linear && !chart.x.ticks.length) lipscope.logTicks(layout.xaxis, traces.map((trace) => ({ y: trace.x })));
  if (chart.x.ticks.length && chart.x.ticks.length <= 16) {
    Object.assign(layout.xaxis, { tickvals: chart.x.ticks, ticktext: chart.x.names.map(lipscope.plain) });
  }
  if (chart.y.log && !linear) {
    lipscope.logTicks(layout.yaxis, traces);
    lipscope.breakAxis(traces, layout);
  } else layout.yaxis.rangemode = "tozero";
  layout.showlegend = traces.filter((trace) => trace.showlegend !== false).length > 1;
  layout.legend = { orientation: "h", y: -0.16, yanchor: "top", x: 0, xanchor: "left", font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)" };
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
    const rough = (high - low) / 4;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * unit).find((size) => size >= rough);
    ticks = Array.from({ length: 12 }, (_, k) => (Math.ceil(low / step) + k) * step).filter((value) => value <= high);
  }
  const name = (value) => {
    if (value < 1e6 && value >= 1e-4) return String(Number(value.toPrecision(4)));
    const [digits, power] = value.toExponential(3).split("e");
    return `${Number(digits) === 1 ? "" : `${Number(digits)}·`}10<sup>${Number(power)}</sup>`;
  };
  Object.assign(axis, { tickvals: ticks, ticktext: ticks.map(name) });
};

// Bounds for all inputs lie far above what is measured at some: they get a part of the axis of their own.
lipscope.breakAxis = (traces, layout) => {
  const bounds = traces.filter((trace) => trace.meta === "bound" && trace.y.length);
  const near = traces.filter((trace) => trace.meta !== "bound").flatMap((trace) => trace.y).filter((y) => y > 0);
  const top = Math.max(...near);
  const far = bounds.filter((trace) => Math.min(...trace.y) > 3 * top);
  if (!far.length || !near.length) return;
  for (const trace of far) trace.yaxis = "y2";
  layout.yaxis2 = { ...layout.yaxis, title: { ...layout.yaxis.title, text: "bounds" }, domain: [0.72, 1] };
  lipscope.logTicks(layout.yaxis2, far);
  layout.yaxis.domain = [0, 0.66];
  lipscope.logTicks(layout.yaxis, traces.filter((trace) => !far.includes(trace)));
};

lipscope.matrix = (chart) => {
  const paper = lipscope.paper();
  const layout = lipscope.layout(paper);
  const ticks = chart.names.length <= 64 ? { tickvals: chart.names.map((_, k) => k), ticktext: chart.names.map(lipscope.plain) } : {};
  const axis = { ...ticks, gridcolor: paper.line, zeroline: false, tickfont: { size: chart.names.length > 36 ? 8 : 10, color: paper.quiet }, automargin: true, showgrid: false };
  layout.xaxis = { ...axis, title: { text: "moving this token (x_j) …", font: { size: 12.5, color: paper.quiet } }, tickangle: -60 };
  layout.yaxis = { ...axis, title: { text: "… moves the output here (out_i)", font: { size: 12.5, color: paper.quiet } }, autorange: "reversed" };
  const text = chart.z.map((row, i) => row.map((value, j) => lipscope.plain(`‖∂out_${i}/∂x_${j}‖ = ${value.toPrecision(3)}: moving ${chart.names[j]} moves ${chart.names[i]}`)));
  const trace = { type: "heatmap", z: chart.z, text, hovertemplate: "%{text}<extra></extra>", colorscale: "Viridis", colorbar: { thickness: 10, outlinewidth: 0, tickfont: { color: paper.quiet } } };
  return { traces: [trace], layout };
};

lipscope.draw = (place, chart, options = {}) => {
  lipscope.drawn.set(place, { chart, options });
  const made = chart.z ? lipscope.matrix(chart) : lipscope.spec(chart, options);
  place.setAttribute("aria-label", chart.words);
  const config = { responsive: true, displayModeBar: false };
  return Plotly.react(place, made.traces, made.layout, config);
};

lipscope.redraw = () => {
  for (const [place, { chart, options }] of lipscope.drawn) {
    if (!place.isConnected) lipscope.drawn.delete(place);
    else lipscope.draw(place, chart, options);
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
