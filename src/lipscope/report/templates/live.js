// A served report looks at the store again and again, and takes over new rows without losing what was chosen.
"use strict";

lipscope.live = { seen: lipscope.data.version, pause: 1500 };

lipscope.look = async () => {
  const words = document.getElementById("live-words");
  try {
    const found = await (await fetch("progress.json", { cache: "no-store" })).json();
    document.getElementById("live-bar").value = found.asked ? (found.done + found.failed) / found.asked : 0;
    words.textContent = found.words;
    if (found.version !== lipscope.live.seen) {
      const fresh = await (await fetch("content.json", { cache: "no-store" })).json();
      lipscope.live.seen = fresh.version;
      lipscope.data = fresh.data;
      document.getElementById("rows").textContent = JSON.stringify(fresh.rows);
      const held = document.activeElement?.closest?.("#content") ? document.activeElement.dataset.cell : undefined;
      document.getElementById("content").innerHTML = fresh.html;
      lipscope.show();
      if (held !== undefined) document.querySelector(`.setting:not([hidden]) .heat button[data-cell="${held}"]`)?.focus();
    }
    lipscope.live.pause = found.running ? 1500 : 5000;
  } catch {
    words.textContent = "The server that made this page has stopped; what is shown stays.";
    lipscope.live.pause = 5000;
  }
  setTimeout(lipscope.look, lipscope.live.pause);
};
lipscope.look();
