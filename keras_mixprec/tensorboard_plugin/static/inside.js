import { formatNumber, momentInWords, toNumber } from "./format.js";
import { isWider } from "./precision.js";

/**
 * What overflows inside of a layer, whose outputs alone would look sound.
 * @param {any} layer A row of the table of layers.
 * @param {any} format What headroom refers to.
 * @returns {{short: string, long: string, isOpen: boolean, amount: string} | null} Open until
 *   a wider dtype holds it; how much it is.
 */
export function insideInWords(layer, format) {
  if (!layer.inside) return null;
  const { largest, step } = layer.inside;
  const bits = Math.log2(toNumber(largest)) - format.maximum_bits;
  const numbers = bits > 0 ? `: numbers up to ${formatNumber(largest)}, ${format.name} holds up to ${
    formatNumber(2 ** format.maximum_bits)}` : "";
  const by = bits > 0 && bits < Infinity ? ` by ${formatNumber(Number(bits.toFixed(1)))} bits` : "";
  const at = `, found ${momentInWords(step)}`;
  if (isWider(layer.compute_dtype, format.name)) {
    const computed = `, computed in ${layer.compute_dtype}`;
    const short = `beyond ${format.name} inside the layer`;
    const amount = `beyond ${format.name} inside${by}`;
    return { short, long: `${short}${numbers}${computed}`, isOpen: false, amount };
  }
  const long = `overflow inside the layer${numbers}${at}`;
  return { short: "▲ overflow inside the layer", long, isOpen: true, amount: `overflow inside${by}` };
}

/**
 * The least headroom of what a layer puts out, where what overflows inside of it would be less.
 * @param {any} layer A row of the table of layers.
 */
export function outputHeadroom(layer) {
  return toNumber(layer?.inside ? layer.inside.outputs : layer?.least_headroom ?? null);
}
