// Light or dark, stored under the chat page's name, as both may be served together. Not a module, so it runs before painting.
(() => {
  const root = document.documentElement;
  const apply = (theme) => {
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  };
  try {
    apply(localStorage.getItem("swarm.theme"));
  } catch {
    // no storage
  }
  document.addEventListener("click", ({ target }) => {
    if (!target.closest("[data-switch-theme]")) return;
    const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : prefersDark;
    apply(isDark ? "light" : "dark");
    try {
      localStorage.setItem("swarm.theme", root.dataset.theme);
    } catch {
      // the choice lasts as long as this page
    }
  });
})();
