// Line charts. A chart is drawn after the page: the page has an empty element for it, and a table with its numbers.

import uPlot from "./vendor/uPlot.esm.js";

const charts = new Map(); // by the id of the element
const HEIGHT = 260;

// Draws lines into the element with this id, if it is on the page. `data` is [x, ...ys], `lines` describes the ys.
export function draw(id, { data, lines, x, y }) {
  const element = document.getElementById(id);
  const shown = charts.get(id);
  const look = JSON.stringify([lines, getComputedStyle(document.documentElement).colorScheme, matchMedia("(prefers-color-scheme: dark)").matches]);
  if (shown && (shown.element !== element || shown.look !== look || shown.plot.width !== element.clientWidth)) {
    shown.plot.destroy();
    charts.delete(id);
  }
  if (!element || !element.clientWidth) return;
  if (charts.has(id)) {
    charts.get(id).plot.setData(data);
    return;
  }
  const ink = color(element, "--muted");
  const grid = { stroke: color(element, "--line"), width: 1 };
  const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font: "12px system-ui, sans-serif" };
  const options = {
    width: element.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, points: { size: 7 } },
    scales: { x: { time: false, ...x.scale }, y: y.scale },
    axes: [{ ...axis, ...x.axis }, { ...axis, size: 58, ...y.axis }],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: color(element, line.color),
        width: 2,
        dash: line.dash,
        points: { show: line.points ?? false, size: 6, fill: color(element, "--surface") },
        paths: line.bars ? uPlot.paths.stepped({ align: 1 }) : undefined,
        spanGaps: false,
      })),
    ],
  };
  charts.set(id, { element, look, plot: new uPlot(options, data, element) });
}

// The value of a colour of the style sheet, in the theme of the element.
function color(element, name) {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
