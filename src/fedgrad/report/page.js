// Shows the values under the pointer. All words and places come with the page.
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
  const node = (name, text, colour) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (colour) made.style.background = `var(--fg-${colour})`;
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
      line.append(node("i", "", curve.colour), `${curve.name} `, node("b", curve.y[i]));
      if (curve.at[i] !== x) line.append(node("small", ` at ${curve.x[i]}`));
      tip.append(line);
      if (curve.up[i] !== null && curve.up[i] >= 0 && curve.up[i] <= 1) {
        const dot = node("i", "", curve.colour);
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
