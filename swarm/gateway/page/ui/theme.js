// The light or dark theme. A plain script in the head, so that the page has its colors from the start.
(() => {
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  const recall = () => {
    try {
      return localStorage.getItem("swarm.theme");
    } catch {
      return null;
    }
  };
  const apply = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  };
  apply(recall());

  document.addEventListener("click", ({ target }) => {
    if (!target.closest("[data-switch-theme]")) return;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches;
    apply(isDark ? "light" : "dark");
    try {
      localStorage.setItem("swarm.theme", root.dataset.theme);
    } catch {
      // without storage, the choice lasts until the page is closed
    }
    document.dispatchEvent(new Event("themechange"));
  });
})();
