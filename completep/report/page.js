const dark = matchMedia("(prefers-color-scheme: dark)");
function ink(light) {
  const [text, line] = dark.matches && !light ? ["#e8eaed", "#363a42"] : ["#1c1d20", "#d9dce1"];
  return { background: "transparent", view: { stroke: line },
    axis: { labelColor: text, titleColor: text, tickColor: line, domainColor: line, gridColor: line },
    legend: { labelColor: text, titleColor: text }, title: { color: text, subtitleColor: text } };
}
// The darkest colours would not be seen on a dark page.
const lighter = { "#440154": "#b48be4", "#3b528b": "#86a3e8", "#000000": "#ffffff" };
function recoloured(text, light) {
  return dark.matches && !light ? Object.entries(lighter).reduce((t, [a, b]) => t.replaceAll(a, b), text) : text;
}
async function draw(light = false) {
  for (const panel of document.querySelectorAll(".panel[data-spec]")) {
    const spec = JSON.parse(recoloured(document.getElementById(panel.dataset.spec).textContent, light));
    // ast: expressions are interpreted, never compiled, since the page forbids eval.
    await vegaEmbed(panel, spec, { actions: false, renderer: "svg", ast: true, config: ink(light) });
  }
  document.body.dataset.drawn = "yes";
}
draw();
dark.addEventListener("change", () => draw());
addEventListener("beforeprint", () => draw(true));
addEventListener("afterprint", () => draw());
