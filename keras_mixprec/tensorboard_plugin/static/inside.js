import { formatInteger, formatNumber, toNumber } from "./format.js";
import { isWider } from "./precision.js";

/**
 * What overflows inside of a layer, whose outputs alone would look sound.
 * @param {any} layer A row of the table of layers.
 * @param {any} format What headroom refers to.
 * @returns {{short: string, long: string, isOpen: boolean} | null} Open until a wider dtype
 *   holds it.
 */
export function insideInWords(layer, format) {
  if (!layer.inside) return null;
  const { largest, step } = layer.inside;
  const numbers = toNumber(largest) > 2 ** format.maximum_bits ?
    `: numbers up to ${formatNumber(largest)}, ${format.name} holds up to ${
      formatNumber(2 ** format.maximum_bits)}` : "";
  const at = `, found at step ${formatInteger(step)}`;
  if (isWider(layer.compute_dtype, format.name)) {
    const computed = `, computed in ${layer.compute_dtype}`;
    const short = `beyond ${format.name} inside`;
    return { short, long: `${short} the layer${numbers}${computed}`, isOpen: false };
  }
  const long = `overflow inside the layer${numbers}${at}`;
  return { short: "▲ overflow inside", long, isOpen: true };
}
