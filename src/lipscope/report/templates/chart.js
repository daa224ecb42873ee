// A page of one chart: all panels are drawn, and again when the theme of the system changes.
"use strict";
for (const place of document.querySelectorAll("[data-chart]")) lipscope.watcher.observe(place);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", lipscope.redraw);
