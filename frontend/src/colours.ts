// Colours that all eyes can tell apart: the palette of Okabe and Ito (2008), lighter on dark ground.

const LIGHT = ["#0072B2", "#D55E00", "#009E73", "#B0578D", "#B57B00", "#3B8FC4", "#444444"];
const DARK = ["#56B4E9", "#F08A4B", "#2FBF94", "#E09AC6", "#E8B93C", "#9DCBF0", "#CCCCCC"];
export const DASHES: number[][] = [[], [6, 3], [2, 3], [9, 3, 2, 3], [12, 4], [1, 2]];

export function isDark(): boolean {
  return document.documentElement.dataset.theme === "dark";
}

export function hue(index: number): string {
  const palette = isDark() ? DARK : LIGHT;
  return palette[index % palette.length];
}

export function faint(colour: string, share: number): string {
  return colour + Math.round(255 * share).toString(16).padStart(2, "0");
}

// Orange below zero, blue above, the ground at zero: `share` is from -1 to 1.
export function diverging(share: number): string {
  const size = Math.min(1, Math.abs(share));
  const [r, g, b] = share < 0 ? [213, 94, 0] : [0, 114, 178];
  const [lr, lg, lb] = isDark() ? (share < 0 ? [240, 138, 75] : [86, 180, 233]) : [r, g, b];
  return `rgba(${lr}, ${lg}, ${lb}, ${(0.08 + 0.72 * size).toFixed(3)})`;
}

// One hue that grows stronger: `share` is from 0 to 1.
export function strength(share: number): string {
  const [r, g, b] = isDark() ? [86, 180, 233] : [0, 114, 178];
  return `rgba(${r}, ${g}, ${b}, ${(0.85 * Math.max(0, Math.min(1, share))).toFixed(3)})`;
}

// How surprising a token was, 0 for a log-probability of 0 and 1 from -5 on: orange, since it is a warning.
export function surprise(logprob: number): string {
  const share = Math.min(1, -logprob / 5);
  const [r, g, b] = isDark() ? [240, 138, 75] : [213, 94, 0];
  return `rgba(${r}, ${g}, ${b}, ${(0.75 * share).toFixed(3)})`;
}

export function ink(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
