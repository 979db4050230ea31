// How many bits a format has for the exponent: its range.
const EXPONENT_BITS = { float16: 5, bfloat16: 8, float32: 8, float64: 11 };

export function isWider(dtype, formatName) {
  return EXPONENT_BITS[dtype] > EXPONENT_BITS[formatName];
}

/**
 * Headroom in the dtype that a layer computes in.
 * @param {number} bits Below the maximum of the format that headroom refers to.
 * @param {string | null} dtype
 * @param {string} formatName
 */
export function ownHeadroom(bits, dtype, formatName) {
  if (!isWider(dtype, formatName)) return bits;
  // The maximum of a format is just below this power of two.
  const [own, other] = [dtype, formatName].map((name) => 2 ** (EXPONENT_BITS[name] - 1));
  return bits + own - other;
}

// A change made after a step is of the steps behind it.
export function dtypeAt(layer, step) {
  const dtypes = layer.dtypes ?? [[0, layer.compute_dtype]];
  const before = dtypes.filter(([since]) => since < step);
  return (before.at(-1) ?? dtypes[0])[1];
}

// After which step a layer's dtype last changed, −1 if it never did. A demotion before the
// first step has no dtype before it.
export function changedAt(layer) {
  return Math.max(layer?.dtypes?.slice(1).at(-1)?.[0] ?? -1, layer?.demoted_at ?? -1);
}

// The wider dtype that a layer had at a step, or null.
export function widerAt(layer, step, formatName) {
  const dtype = layer ? dtypeAt(layer, step) : null;
  return isWider(dtype, formatName) ? dtype : null;
}

// Whether no layer ever computed in the format, so that headroom is hypothetical.
export function isAsIf(layers, formatName) {
  return layers.every(({ dtypes, compute_dtype: dtype }) => {
    return (dtypes ?? [[0, dtype]]).every(([, one]) => isWider(one, formatName));
  });
}

export function everWider(layer, formatName) {
  const dtypes = layer?.dtypes?.map(([, dtype]) => dtype) ?? [layer?.compute_dtype];
  return dtypes.some((dtype) => isWider(dtype, formatName));
}
