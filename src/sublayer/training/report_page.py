"""The fixed parts of report.html: its style sheet and the few lines of script that follow the pointer."""

from __future__ import annotations

# Colours of curves and marks are those of Okabe and Ito, told apart with any colour vision; the dark ones are lighter.
STYLE = """
:root { color-scheme: light dark; --page: #fbfaf8; --card: #fff; --text: #1d2125; --soft: #646b73; --rule: #e4e2dd;
  --k0: #0072b2; --k1: #d55e00; --k2: #009e73; --k3: #a6558a; --k4: #b58900; --k5: #4b5563;
  --good: #00795a; --bad: #b84a00; --bad-page: #fdf1e8; --heat: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --card: #1b1f23; --text: #e6e4df; --soft: #9aa1a9;
  --rule: #30353b; --k0: #56b4e9; --k1: #f0a03c; --k2: #3fc79f; --k3: #dd9cc2; --k4: #e8d44d; --k5: #aab2bb;
  --good: #3fc79f; --bad: #f0a03c; --bad-page: #2c241a; --heat: #7cc7f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 4px 16px; margin-bottom: 24px; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.015em; margin: 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { break-after: avoid; font-size: 18px; letter-spacing: -.005em; margin: 44px 0 14px; font-weight: 620; }
h2 small { font-size: 14px; font-weight: 400; color: var(--soft); margin-left: 8px; letter-spacing: 0; }
.status { color: var(--soft); overflow-wrap: anywhere; }
.status::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px;
  background: var(--k0); }
.status.finished::before { background: var(--good); }
.status.stopped::before { background: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); border-top: 1px solid var(--rule);
  border-bottom: 1px solid var(--rule); padding: 14px 0; gap: 14px 12px; margin: 0 0 24px; }
.tiles dt, .facts dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 23px; line-height: 1.25; font-variant-numeric: tabular-nums; letter-spacing: -.01em; }
.tiles dd small { display: block; font-size: 12px; color: var(--soft); letter-spacing: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(240px, 1fr)); gap: 8px 28px; margin: 0; }
.facts dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 20px; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 14px 18px 12px; min-width: 0; break-inside: avoid; }
figure.wide { grid-column: 1 / -1; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 16px; align-items: baseline; margin-bottom: 12px; }
figcaption b { font-weight: 600; }
.key, .scale { font-size: 13px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: var(--color); }
.scale { margin-left: auto; }
.key.lost { --color: var(--text); }
.key.lost::before { width: 6px; height: 6px; border-radius: 0; }
.k0 { --color: var(--k0); } .k1 { --color: var(--k1); } .k2 { --color: var(--k2); }
.k3 { --color: var(--k3); } .k4 { --color: var(--k4); } .k5 { --color: var(--k5); }
.plot { display: grid; grid-template: 190px 22px / 46px 1fr; font-size: 12px; color: var(--soft);
  font-variant-numeric: tabular-nums; padding-right: 10px; }
.wide .plot { grid-template-rows: 290px 22px; }
.area, .x, .y { position: relative; }
.area { touch-action: pan-y; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.y span { position: absolute; right: 9px; transform: translateY(50%); white-space: nowrap; }
.x { grid-column: 2; }
.x span { position: absolute; top: 6px; transform: translateX(-50%); white-space: nowrap; }
.grid, .line, .dot, .gap { vector-effect: non-scaling-stroke; fill: none; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { stroke: var(--color); stroke-width: 1.8; stroke-linejoin: round; stroke-linecap: round; }
.dot { stroke: var(--color); stroke-width: 6.5; stroke-linecap: round; }
.gap { stroke: var(--text); stroke-width: 6; stroke-linecap: square; }
.cross { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--soft); opacity: .6;
  pointer-events: none; }
.tip { position: absolute; top: 0; background: var(--text); color: var(--page); padding: 4px 9px; border-radius: 6px;
  font-size: 12px; line-height: 1.45; white-space: pre; pointer-events: none; z-index: 1; }
.scroll { overflow-x: auto; }
.pictures { display: flex; flex-wrap: wrap; gap: 20px; align-items: start; }
.attention { max-width: 100%; }
.attention svg { display: block; }
.attention rect { width: 1px; height: 1px; fill: var(--heat); }
.attention .frame { fill: none; stroke: var(--rule); vector-effect: non-scaling-stroke; }
.attention text { font-size: 12px; fill: var(--text); }
.samples { border-top: 1px solid var(--rule); }
.sample { display: grid; grid-template-columns: 24px 1fr 1fr 1fr; gap: 4px 20px; padding: 10px 8px;
  border-bottom: 1px solid var(--rule); break-inside: avoid; }
.sample.differs { background: var(--bad-page); }
.sample .mark { font-weight: 700; color: var(--good); }
.sample.differs .mark { color: var(--bad); }
.sample p { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 0; }
.sample p:last-child:nth-child(3) { grid-column: span 2; }
.sample p::before { content: attr(data-name); display: block; font-size: 12px; color: var(--soft); }
mark { background: none; color: var(--bad); text-decoration: underline; text-underline-offset: 3px;
  text-decoration-thickness: 1.5px; }
ul { padding-left: 20px; margin: 0; }
li { overflow-wrap: anywhere; }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 18px;
  margin-top: 44px; }
summary { cursor: pointer; font-weight: 620; }
pre { margin: 12px 0 2px; overflow-x: auto; font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; }
@media (max-width: 640px) {
  main { padding: 24px 14px 40px; }
  h1 { font-size: 23px; }
  .tiles { grid-template-columns: repeat(2, 1fr); }
  .facts { grid-template-columns: 1fr; gap: 6px; }
  .facts div { display: grid; grid-template-columns: 42% 1fr; gap: 10px; align-items: baseline; }
  .plot, .wide .plot { grid-template: 190px 22px / 42px 1fr; }
  .x span:nth-child(even) { display: none; }
  figure { padding: 12px 12px 10px; }
  .sample { grid-template-columns: 24px 1fr; }
  .sample p, .sample p:last-child:nth-child(3) { grid-column: 2; }
  .sample .mark { grid-row: 1 / span 3; }
}
@page { margin: 14mm; }
@media print {
  .charts { grid-template-columns: 1fr 1fr; gap: 12px; }
  .plot { grid-template-rows: 130px 22px; }
  .x span:nth-child(even) { display: none; }
  :root { --page: #fff; --card: #fff; --text: #000; --soft: #444; --rule: #ccc; }
  main { max-width: none; padding: 0; }
  body { font-size: 12px; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  details::details-content { content-visibility: visible; height: auto; }
  pre { white-space: pre-wrap; }
  .attention svg { max-width: 100%; height: auto; }
}
"""

SCRIPT = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const series = JSON.parse(figure.dataset.series), high = Number(figure.dataset.high), unit = figure.dataset.unit;
  const area = figure.querySelector(".area");
  const cross = document.createElement("div"), tip = document.createElement("div");
  cross.className = "cross"; tip.className = "tip";
  cross.hidden = tip.hidden = true;
  area.append(cross, tip);
  const nearest = (points, step) => {
    let low = 0, top = points.length - 1;
    while (top - low > 1) {
      const middle = (low + top) >> 1;
      if (points[middle][0] < step) low = middle; else top = middle;
    }
    return step - points[low][0] < points[top][0] - step ? points[low] : points[top];
  };
  const number = value => Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en")
    : String(Number(value.toPrecision(4)));
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    const place = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const found = series.map(one => [one.name, nearest(one.points, place * high)]);
    const away = step => Math.abs(step - place * high);
    const step = found.map(one => one[1][0]).reduce((a, b) => away(a) <= away(b) ? a : b);
    const lines = found.map(one => one[0] + " " + number(one[1][1]) + unit
      + (one[1][0] === step ? "" : " (step " + one[1][0].toLocaleString("en") + ")"));
    tip.textContent = ["step " + step.toLocaleString("en"), ...lines].join("\\n");
    cross.hidden = tip.hidden = false;
    cross.style.left = step / high * 100 + "%";
    const left = step / high * box.width;
    const flipped = left + tip.offsetWidth + 12 > box.width;
    tip.style.left = (flipped ? Math.max(0, left - tip.offsetWidth - 10) : left + 10) + "px";
  });
  area.addEventListener("pointerleave", () => { cross.hidden = tip.hidden = true; });
}
"""
