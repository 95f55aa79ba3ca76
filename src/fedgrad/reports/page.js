// Shows the values under the pointer, where wide things go on, and a run that goes on. All words and
// places come with the page.
"use strict";
for (const plot of document.querySelectorAll(".plot[data-chart]")) {
  const chart = JSON.parse(plot.dataset.chart);
  const cursor = plot.querySelector(".cursor"), tip = plot.querySelector(".tip");
  const places = [...new Set(chart.curves.flatMap((c) => c.at))].sort((a, b) => a - b);
  let here = -1;

  const nearest = (list, x) => {
    let low = 0, high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - list[low - 1] < list[low] - x ? low - 1 : low;
  };
  const node = (name, text, color) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (color) made.style.background = `var(--fg-${color})`;
    return made;
  };
  const show = (index) => {
    here = Math.max(0, Math.min(places.length - 1, index));
    const x = places[here];
    cursor.style.left = `${100 * x}%`;
    cursor.replaceChildren();
    tip.replaceChildren();
    const words = chart.curves.map((c) => c.x[c.at.indexOf(x)]).find((w) => w !== undefined);
    tip.append(node("div", `${chart.x} ${words}`));
    for (const curve of chart.curves) {
      const i = nearest(curve.at, x);
      // A curve that ends before, or starts after, has nothing to say here.
      if (x < curve.at[0] || x > curve.at[curve.at.length - 1]) continue;
      const line = node("div", "");
      line.append(node("i", "", curve.color), `${curve.name} `, node("b", curve.y[i]));
      if (curve.at[i] !== x) line.append(node("small", ` at ${curve.x[i]}`));
      tip.append(line);
      if (curve.up[i] !== null && curve.up[i] >= 0 && curve.up[i] <= 1) {
        const dot = node("i", "", curve.color);
        dot.style.bottom = `${100 * curve.up[i]}%`;
        cursor.append(dot);
      }
    }
    cursor.hidden = tip.hidden = false;
    const room = plot.clientWidth, wide = tip.offsetWidth, at = x * room;
    tip.style.left = `${at + 14 + wide <= room ? at + 14 : Math.max(-50, at - 14 - wide)}px`;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const point = (event) => {
    const box = plot.getBoundingClientRect();
    show(nearest(places, (event.clientX - box.left) / box.width));
  };
  if (!places.length) continue;
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") hide();
    if (step === undefined) return;
    event.preventDefault();
    show(here < 0 ? 0 : here + step);
  });
}

for (const box of document.querySelectorAll(".scroll")) {
  const hint = document.createElement("p");
  hint.className = "note sideways";
  hint.textContent = "scrolls sideways \u2194";
  box.before(hint);
  const edges = () => {
    const room = box.scrollWidth - box.clientWidth;
    hint.hidden = room < 4;
    if (room < 4) box.removeAttribute("tabindex"); else box.tabIndex = 0;
    box.classList.toggle("before", box.scrollLeft > 3);
    box.classList.toggle("after", room - box.scrollLeft > 3);
  };
  // A graph begins where the messages are.
  const round = box.querySelector("svg rect.fill-round");
  if (round) box.scrollLeft = round.getBoundingClientRect().left - box.getBoundingClientRect().left - 24;
  box.addEventListener("scroll", edges, { passive: true });
  window.addEventListener("resize", edges);
  box.closest("details")?.addEventListener("toggle", edges);
  edges();
}

// A run that goes on: the file is written anew while it trains, so the page is loaded again, where
// it was and as it was. After the end it looks a few times more: another run may follow.
{
  const key = `fedgrad ${location.pathname}`;
  const kept = (() => { try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; } })();
  const live = document.documentElement.hasAttribute("data-live");
  const parts = () => [...document.querySelectorAll("details")];
  const looks = live ? 0 : (kept.looks ?? 3) + 1;
  if (live || kept.following) {
    if (kept.axis) document.getElementById(kept.axis)?.click();
    parts().forEach((part, i) => { if (kept.open?.[i]) part.open = true; });
    if (kept.top) window.scrollTo(0, kept.top);
  }
  let busy = false;
  document.addEventListener("pointerover", (event) => { busy = Boolean(event.target.closest?.(".plot")); });
  const again = () => {
    if (busy || document.hidden || String(getSelection())) return setTimeout(again, 500);
    const axis = document.querySelector(".axis:checked")?.id;
    const state = { following: true, looks, axis, top: window.scrollY, open: parts().map((part) => part.open) };
    try { sessionStorage.setItem(key, JSON.stringify(state)); } catch { /* then it begins at its top */ }
    location.reload();
  };
  if (live || looks <= 3) setTimeout(again, live ? 2500 : 4000 * looks);
  else { try { sessionStorage.removeItem(key); } catch { /* there is none */ } }
  const running = document.querySelector(".running");
  if (running) {
    const age = () => {
      const seconds = Math.round((Date.now() - Date.parse(running.dataset.written)) / 1000);
      // Compiling may take minutes, in which there is nothing to tell.
      const old = seconds > 120 && running.querySelector("progress").value ? " It may have been ended." : "";
      running.querySelector(".age").textContent = seconds > 15 ? `last news ${seconds} s ago.${old}` : "";
    };
    age();
    setInterval(age, 1000);
  }
}
