const charts = JSON.parse(document.getElementById("figures").textContent);
const config = {displayModeBar: false, responsive: true, doubleClick: "reset"};
for (const [id, figure] of Object.entries(charts)) {
  Plotly.newPlot(id, figure.data, figure.layout, config);
}
