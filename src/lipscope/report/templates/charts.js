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
  tickfont: { color: paper.quiet }, exponentformat: "power",
});

lipscope.spec = (chart, options) => {
  const paper = lipscope.paper();
  const palette = lipscope.data.palettes[lipscope.theme()];
  const shown = options.groups || {};
  const traces = chart.traces.filter((trace) => shown[lipscope.data.looks[trace.look].group] !== false).map((trace) => {
    const { group, ...look } = lipscope.coloured(lipscope.data.looks[trace.look], palette);
    const made = { ...look, x: trace.x, y: trace.y, name: lipscope.plain(trace.name), legendgroup: lipscope.plain(trace.name) };
    if (trace.text) made.text = trace.text.map(lipscope.plain);
    if (trace.high) made.error_y = { ...look.error_y, array: trace.high, arrayminus: trace.low };
    return made;
  });
  const linear = options.linear === true;
  const narrow = options.width < 560;
  const layout = lipscope.layout(paper);
  layout.xaxis = lipscope.axis(paper, chart.x, chart.x.log && !linear);
  layout.yaxis = lipscope.axis(paper, chart.y, chart.y.log && !linear);
  if (chart.x.ticks.length && chart.x.ticks.length <= 16) {
    Object.assign(layout.xaxis, { tickvals: chart.x.ticks, ticktext: chart.x.names.map(lipscope.plain) });
  }
  if (chart.y.log && !linear) {
    const heights = traces.flatMap((trace) => trace.y).filter((y) => y > 0);
    const decades = Math.log10(Math.max(...heights) / Math.min(...heights));
    layout.yaxis.dtick = decades > 6 ? undefined : decades > 2.2 ? 1 : "D2";
  } else if (!chart.y.log || linear) layout.yaxis.rangemode = "tozero";
  const many = traces.filter((trace) => trace.showlegend !== false).length;
  layout.showlegend = many > 1;
  layout.legend = narrow || many <= 6
    ? { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 11.5 }, bgcolor: "rgba(0,0,0,0)" }
    : { font: { size: 11 }, bgcolor: "rgba(0,0,0,0)", tracegroupgap: 0, itemwidth: 30 };
  return { traces, layout };
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
  const made = chart.z ? lipscope.matrix(chart) : lipscope.spec(chart, { ...options, width: place.clientWidth });
  place.setAttribute("aria-label", chart.words);
  const config = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"] };
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
