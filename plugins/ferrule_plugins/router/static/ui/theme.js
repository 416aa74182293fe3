// Runs before the first paint: a page that was told to be dark never flashes white.
(() => {
  const chosen = localStorage.getItem("ferrule-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
