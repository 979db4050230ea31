const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

// JSON has no infinity and no NaN, so the server sends the strings inf, -inf and nan.
export function toNumber(value) {
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return value === null || value === "nan" ? NaN : Number(value);
}

export function formatPower(exponent) {
  const digits = String(Math.abs(exponent));
  const sign = exponent < 0 ? "⁻" : "";
  return "2" + sign + [...digits].map((digit) => SUPERSCRIPTS[digit]).join("");
}

// Shows 2**15 as 2¹⁵, and code without backticks.
export function readable(text) {
  return String(text).replaceAll("`", "").replace(/\b2\*\*(-?\d+)(?!\d|\.\d)/g, (_, exponent) => {
    return formatPower(Number(exponent));
  });
}

export function formatScale(value) {
  const exponent = Math.log2(toNumber(value));
  return Number.isInteger(exponent) ? formatPower(exponent) : formatNumber(value);
}

export function formatNumber(value) {
  const number = toNumber(value);
  if (Number.isNaN(number)) return "NaN";
  if (!Number.isFinite(number)) return number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return number.toExponential(1);
  if (Number.isInteger(number) || size >= 1000) return formatInteger(number);
  return String(Number(number.toPrecision(3)));
}

export function formatInteger(value) {
  return String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function formatShare(share) {
  if (!Number.isFinite(share)) return "–";
  if (share === 0) return "0%";
  if (share < 0.0001) return "<0.01%";
  // Round down near 100%, because 99.99% must not become 100%.
  return `${share > 0.99 ? Math.floor(share * 1e4) / 100 : Number((share * 100).toPrecision(2))}%`;
}

/** Returns a step in words. Steps count from 1, and 0 is the time before the first step. */
export function momentInWords(step, at = "at") {
  return step === 0 ? "before the first step" : `${at} step ${formatInteger(step)}`.trim();
}

export function plural(count, noun) {
  return `${formatInteger(count)} ${noun}${count === 1 ? "" : "s"}`;
}
