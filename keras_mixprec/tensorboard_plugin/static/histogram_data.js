import { countAtMost } from "./scales.js";

// The exponent under which histograms count infinities and NaNs.
const NONFINITE = 128;

export function histogramAt(data, step) {
  if (!data || !data.steps.length) return null;
  const at = step === null ? data.steps.length : countAtMost(data.steps, step);
  const index = Math.max(0, at - 1);
  const bars = data.exponents[index].map((exponent, place) => {
    return { exponent, count: data.counts[index][place] };
  }).filter((bar) => bar.count > 0);
  const finite = bars.filter((bar) => bar.exponent < NONFINITE);
  const total = (some) => some.reduce((sum, bar) => sum + bar.count, 0);
  const nonfinite = total(bars) ? 1 - total(finite) / total(bars) : 0;
  return { step: data.steps[index], bars: finite, nonfinite };
}

export function zoneOf(exponent, format) {
  if (exponent >= format.maximum_exponent) return "overflow";
  if (exponent >= format.normal_exponent) return "normal";
  return exponent >= format.subnormal_exponent ? "subnormal" : "vanishes";
}

// Returns the share of the finite elements in each zone of a format.
export function shareByZone(bars, format) {
  const shares = { overflow: 0, normal: 0, subnormal: 0, vanishes: 0 };
  const total = bars.reduce((sum, bar) => sum + bar.count, 0);
  for (const bar of bars) {
    shares[zoneOf(bar.exponent, format)] += bar.count / total;
  }
  return shares;
}

export function exponentDomain(bars, format) {
  const exponents = bars.map((bar) => bar.exponent);
  return [
    Math.min(format.subnormal_exponent - 4, ...exponents),
    Math.max(format.maximum_exponent + 4, ...exponents) + 1,
  ];
}
