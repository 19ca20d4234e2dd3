// Numbers as people read them.

export function num(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value) < 1e-12 ? 0 : Math.abs(value);
  if (!size) return "0";
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

export function signed(value: number | null | undefined, digits = 2): string {
  if (value === null || value === undefined) return "–";
  const text = Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(digits);
  return value > 0 ? `+${text}` : text.replace("-", "−");
}

export function percent(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}%`;
}

export function count(value: number): string {
  return Math.round(value).toLocaleString("en");
}

export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.round(minutes / 1440)} days`;
}

export function bytes(size: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (size >= 1000 && at < units.length - 1) {
    size /= 1000;
    at += 1;
  }
  return `${at && size < 10 ? size.toFixed(1) : size.toFixed(0)} ${units[at]}`;
}

export function when(created: string): string {
  return created.slice(0, 16).replace("T", " ");
}

// "held-out dev"; a name that says it already stands alone.
export function evalTitle(name: string): string {
  return name.startsWith("held") ? name.replaceAll("_", " ") : `held-out ${name}`;
}

// A step is the number of training steps done, as in --checkpoint.
export function afterSteps(step: number | null | undefined): string {
  return step ? `after ${count(step)} step${step > 1 ? "s" : ""}` : "before training";
}
