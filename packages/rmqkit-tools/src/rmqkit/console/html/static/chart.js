// Draw a line at the pointer, with its time. The figures are in the table of the chart.
const clock = (at, span) => new Date(at).toISOString().slice(...(span > 864e5 ? [5, 16] : [11, 19])).replace("T", " ");

document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg.chart");
  for (const line of document.querySelectorAll(".chart .cursor, .chart .cursor-at")) line.remove();
  if (!chart) return;
  const box = chart.getBoundingClientRect();
  const { begin, end, left, right } = chart.dataset;
  const x = ((event.clientX - box.left) * chart.viewBox.baseVal.width) / box.width;
  if (x < Number(left) || x > Number(right)) return;
  const make = (name, values) => {
    const one = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(values)) one.setAttribute(key, value);
    chart.append(one);
    return one;
  };
  make("line", { class: "cursor", x1: x, x2: x, y1: 10, y2: 142 });
  const at = Number(begin) + ((x - left) / (right - left)) * (end - begin);
  make("text", { class: "tick cursor-at", x: Math.min(x + 5, right - 60), y: 22 }).textContent = `${clock(at, end - begin)} UTC`;
});
