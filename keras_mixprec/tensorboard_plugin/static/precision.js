// The number of exponent bits of each format, which determines the range of the format.
const EXPONENT_BITS = { float16: 5, bfloat16: 8, float32: 8, float64: 11 };

export function isWider(dtype, formatName) {
  return EXPONENT_BITS[dtype] > EXPONENT_BITS[formatName];
}

/**
 * Returns headroom in the compute dtype of a layer.
 * @param {number} bits Headroom in the format that the run's headroom refers to.
 * @param {string | null} dtype
 * @param {string} formatName
 */
export function ownHeadroom(bits, dtype, formatName) {
  if (!isWider(dtype, formatName)) return bits;
  // The maximum of a format is just below 2 to the power of 2 ** (exponent bits - 1).
  const [own, other] = [dtype, formatName].map((name) => 2 ** (EXPONENT_BITS[name] - 1));
  return bits + own - other;
}

// Returns the dtype at a step. A change at a step takes effect at the next step.
export function dtypeAt(layer, step) {
  const dtypes = layer.dtypes ?? [[0, layer.compute_dtype]];
  const before = dtypes.filter(([since]) => since < step);
  return (before.at(-1) ?? dtypes[0])[1];
}

// Returns the step at which a layer's dtype last changed, or −1. A demotion before the first
// step does not count, because no step used the earlier dtype.
export function changedAt(layer) {
  return Math.max(layer?.dtypes?.slice(1).at(-1)?.[0] ?? -1, layer?.demoted_at ?? -1);
}

// Returns the dtype of a layer at a step if it is wider than the format, or null.
export function widerAt(layer, step, formatName) {
  const dtype = layer ? dtypeAt(layer, step) : null;
  return isWider(dtype, formatName) ? dtype : null;
}

// Returns whether headroom is hypothetical, because no layer ever computed in the format.
export function isAsIf(layers, formatName) {
  return layers.every(({ dtypes, compute_dtype: dtype }) => {
    return (dtypes ?? [[0, dtype]]).every(([, one]) => isWider(one, formatName));
  });
}

export function everWider(layer, formatName) {
  const dtypes = layer?.dtypes?.map(([, dtype]) => dtype) ?? [layer?.compute_dtype];
  return dtypes.some((dtype) => isWider(dtype, formatName));
}
