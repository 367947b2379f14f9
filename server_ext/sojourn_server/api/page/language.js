// Before uPlot, which formats numbers in the browser's language and draws nothing where that is not a language tag:
// a Chromium on a system with LANG=C names "en-US@posix".
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
