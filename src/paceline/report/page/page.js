"use strict";
// The values under the pointer, or under the cursor that the arrow keys move.
for (const figure of document.querySelectorAll(".chart")) {
  const plot = figure.querySelector(".plot");
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [low, high, label] = data.x;
  const cursor = document.createElement("div"), tips = document.createElement("div");
  cursor.className = "cursor";
  tips.className = "tips";
  tips.setAttribute("role", "status");
  let at = null;

  const words = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 6 });
  const cell = (name, text) => Object.assign(document.createElement(name), { textContent: text });

  function nearest(xs, x) {
    let left = 0, right = xs.length - 1;
    while (left < right) {
      const middle = (left + right) >> 1;
      if (xs[middle] < x) left = middle + 1; else right = middle;
    }
    return left > 0 && x - xs[left - 1] < xs[left] - x ? left - 1 : left;
  }

  function show(x) {
    const shown = data.lines.filter((line) => line.x.length && document.getElementById(`show-${line.run}`)?.checked !== false);
    if (!shown.length) return hide();
    const reach = (line) => line.x[nearest(line.x, x)];
    at = shown.map(reach).reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a));
    const share = (at - low) / (high - low);
    cursor.style.left = `${100 * share}%`;
    tips.replaceChildren(cell("p", `${label}: ${words(at)}`));
    for (const line of shown) {
      const tip = cell("div", "");
      tip.className = `tip run-${line.run}`;
      const swatch = cell("span", "");
      swatch.className = "swatch";
      tip.append(swatch, cell("span", line.name), cell("b", words(line.y[nearest(line.x, x)])));
      tips.append(tip);
    }
    tips.style.left = share < 0.5 ? `calc(${100 * share}% + 12px)` : "auto";
    tips.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 12px)`;
    plot.append(cursor, tips);
  }

  function hide() {
    at = null;
    cursor.remove();
    tips.remove();
  }

  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    show(low + ((high - low) * (event.clientX - box.left)) / box.width);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!way) return;
    event.preventDefault();
    show(Math.min(high, Math.max(low, (at ?? (way > 0 ? low : high)) + (way * (high - low)) / 50)));
  });
}
