import { toNumber } from "./format.js";
import { labelOfRun } from "./names.js";
import { alarmLevel } from "./palette.js";
import { isWider, ownHeadroom } from "./precision.js";

/**
 * The columns of the table of layers: what each is of a layer, and of a block.
 * @returns {{id: string, label: string, of: (layer: any) => any,
 *   ofBlock: (layers: any[]) => any, compares?: string, number?: boolean,
 *   otherOf?: (layer: any) => any, run?: string, runLabel?: string}[]}
 */
export function layerColumns(run, compared) {
  const others = new Map((compared?.layers ?? []).map((layer) => [layer.path, layer]));
  const otherOf = (layer) => others.get(layer.path);
  const otherLayers = (layers) => layers.map(otherOf).filter(Boolean);
  const [own, other] = [run, compared].map((data) => data?.format?.name ?? "float16");
  const least = (formatName) => (layers) => {
    return layers.length ? headroomOf(worstLayer(layers, formatName), formatName) : null;
  };
  const gravest = (layers) => most(layers.map(severityOfLayer));
  const columns = [
    {
      id: "path", label: "Layer", of: (layer) => layer.path,
      ofBlock: (layers) => layers[0].path,
    },
    { id: "class", label: "Class", of: (layer) => layer.class, ofBlock: () => null },
    {
      id: "dtype", label: "Type", of: (layer) => layer.compute_dtype, ofBlock: typesOf,
    },
    {
      id: "other-dtype", label: "Type", compares: "dtype", otherOf,
      of: (layer) => otherOf(layer)?.compute_dtype ?? null,
      ofBlock: (layers) => typesOf(otherLayers(layers)),
    },
    {
      id: "headroom", label: "Activation headroom", of: (layer) => headroomOf(layer, own),
      ofBlock: least(own),
    },
    {
      id: "other-headroom", label: "Activation headroom", compares: "headroom", otherOf,
      of: (layer) => headroomOf(otherOf(layer), other),
      ofBlock: (layers) => least(other)(otherLayers(layers)),
    },
    { id: "verdicts", label: "Verdicts", of: severityOfLayer, ofBlock: gravest },
    {
      id: "other-verdicts", label: "Verdicts", compares: "verdicts", otherOf,
      of: (layer) => severityOfLayer(otherOf(layer)),
      ofBlock: (layers) => gravest(otherLayers(layers)),
    },
    {
      id: "demoted", label: "Demoted", of: (layer) => layer.demoted_at,
      ofBlock: (layers) => leastOf(layers.map((layer) => layer.demoted_at)),
    },
    {
      id: "parameters", label: "Params", number: true,
      of: (layer) => layer.parameters,
      ofBlock: (layers) => sum(layers.map((layer) => layer.parameters)),
    },
    {
      id: "flops", label: "FLOPs", number: true, of: (layer) => layer.share_of_flops,
      ofBlock: (layers) => sum(layers.map((layer) => layer.share_of_flops)),
    },
  ];
  if (!compared) return columns.filter((column) => !column.compares);
  const compares = new Set(columns.map((column) => column.compares));
  return columns.map((column) => {
    if (!column.compares && !compares.has(column.id)) return column;
    const [one, two] = column.compares ? [compared, run] : [run, compared];
    return { ...column, run: one.run, runLabel: labelOfRun(one.run, two.run) };
  });
}

const known = (values) => values.filter((value) => value !== null && value !== undefined);

function most(values) {
  return known(values).length ? Math.max(...known(values)) : null;
}

function leastOf(values) {
  return known(values).length ? Math.min(...known(values)) : null;
}

function sum(values) {
  const found = known(values);
  return found.length ? found.reduce((total, value) => total + value, 0) : null;
}

function typesOf(layers) {
  return [...new Set(layers.map((layer) => layer.compute_dtype))].sort().join(" ");
}

// In the dtype that the layer computes in.
export function headroomOf(layer, formatName) {
  const bits = toNumber(layer?.least_headroom ?? null);
  return Number.isNaN(bits) ? null : ownHeadroom(bits, layer.compute_dtype, formatName);
}

function severityOfLayer(layer) {
  return layer?.severity ?? null;
}

const LEVEL_ORDER = ["bad", "passed", "warning", "quiet", "roomy", "beyond", "zero", "none"];

function rankOf(layer, formatName) {
  const bits = toNumber(layer.least_headroom ?? null);
  const level = layer.passed ? "passed" :
    alarmLevel("headroom", bits, isWider(layer.compute_dtype, formatName));
  return [LEVEL_ORDER.indexOf(level), Number.isNaN(bits) ? Infinity : bits];
}

// The layer with the worst headroom: what a wider dtype holds is no fault.
export function worstLayer(layers, formatName) {
  return layers.reduce((worst, layer) => {
    const [one, two] = [rankOf(layer, formatName), rankOf(worst, formatName)];
    return one[0] < two[0] || (one[0] === two[0] && one[1] < two[1]) ? layer : worst;
  });
}

// Missing values stay last whichever way the column is sorted.
export function sortLayers(layers, valueOf, descending) {
  const order = descending ? -1 : 1;
  const known = (value) => value !== null && value !== undefined;
  return layers
    .map((layer, index) => ({ layer, index, value: valueOf(layer) }))
    .sort((one, other) => {
      if (!known(one.value) || !known(other.value)) {
        return Number(known(other.value)) - Number(known(one.value))
          || one.index - other.index;
      }
      if (one.value === other.value) return one.index - other.index;
      return (one.value < other.value ? -1 : 1) * order;
    })
    .map((entry) => entry.layer);
}

const ALIASES = {
  float16: ["fp16", "half"], bfloat16: ["bf16"], float32: ["fp32", "single"],
  float64: ["fp64", "double"],
};

// "float16" is not to find "bfloat16", but "16" both.
function matchesType(dtype, needle) {
  return [dtype, ...ALIASES[dtype] ?? []].some((name) => {
    return name.startsWith(needle) || (/^\d/.test(needle) && name.endsWith(needle));
  });
}

const haystacks = new WeakMap();

function haystackOf(layer) {
  if (!haystacks.has(layer)) {
    const about = [layer.path, layer.class, ...layer.verdicts].join(" ").toLowerCase();
    haystacks.set(layer, `${about} ${about.replaceAll("_", " ")}`);
  }
  return haystacks.get(layer);
}

export function matchesFilter(layer, text) {
  const haystack = haystackOf(layer);
  return text.toLowerCase().split(/\s+/).every((needle) => {
    return haystack.includes(needle) || matchesType(layer.compute_dtype ?? "", needle);
  });
}
