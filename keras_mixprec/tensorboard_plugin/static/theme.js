let remembered = null;

export function themeColor(name) {
  remembered ??= new Map();
  if (!remembered.has(name)) {
    const style = getComputedStyle(document.documentElement);
    remembered.set(name, style.getPropertyValue(name).trim());
  }
  return remembered.get(name);
}

function hostBody() {
  try {
    return window.parent.document.body;
  } catch {
    return null;
  }
}

export function watchTheme(inTensorBoard, onChange) {
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const host = inTensorBoard ? hostBody() : null;
  const apply = () => {
    const dark = host ? host.classList.contains("dark-mode") : media.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    remembered = null;
    onChange();
  };
  if (host) {
    const observer = new MutationObserver(apply);
    observer.observe(host, { attributes: true, attributeFilter: ["class"] });
  } else {
    media.addEventListener("change", apply);
  }
  apply();
}
