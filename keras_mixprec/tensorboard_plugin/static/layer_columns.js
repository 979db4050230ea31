import { toNumber } from "./format.js";
import { labelOfRun } from "./names.js";

const dtypeOf = (layer) => layer?.compute_dtype ?? null;
// The columns that a comparison shows for both runs.
const COMPARED = {
  dtype: { label: "Type", of: dtypeOf, ofBlock: (layers) => [...new Set(layers.map(dtypeOf))].sort().join(" ") },
  headroom: {
    label: "Activation headroom", of: (layer) => headroomOf(layer),
    ofBlock: (layers) => (layers.length ? headroomOf(worstLayer(layers)) : null),
  },
  verdicts: {
    label: "Verdicts", of: (layer) => layer?.severity ?? null,
    ofBlock: (layers) => most(layers.map(({ severity }) => severity)),
  },
};

/**
 * Returns the columns of the table of layers, with functions for their values.
 * @returns {{id: string, label: string, of: (layer: any) => any,
 *   ofBlock: (layers: any[]) => any, compares?: string, number?: boolean,
 *   otherOf?: (layer: any) => any, run?: string, runLabel?: string}[]}
 */
export function layerColumns(run, compared) {
  const others = new Map((compared?.layers ?? []).map((layer) => [layer.path, layer]));
  const otherOf = (layer) => others.get(layer.path);
  const columnsOf = (id) => {
    const { label, of, ofBlock } = COMPARED[id];
    const own = { id, label, of, ofBlock };
    if (!compared) return [own];
    const named = (one, two) => ({ run: one.run, runLabel: labelOfRun(one.run, two.run) });
    return [{ ...own, ...named(run, compared) }, {
      id: `other-${id}`, label, compares: id, otherOf, of: (layer) => of(otherOf(layer)),
      ofBlock: (layers) => ofBlock(layers.map(otherOf).filter(Boolean)), ...named(compared, run),
    }];
  };
  return [
    { id: "path", label: "Layer", of: (layer) => layer.path, ofBlock: (layers) => layers[0].path },
    { id: "class", label: "Class", of: (layer) => layer.class, ofBlock: () => null },
    ...Object.keys(COMPARED).flatMap(columnsOf),
    {
      id: "demoted", label: "Demoted", of: (layer) => layer.demoted_at,
      ofBlock: (layers) => leastOf(layers.map((layer) => layer.demoted_at)),
    },
    {
      id: "parameters", label: "Params", number: true, of: (layer) => layer.parameters,
      ofBlock: (layers) => sum(layers.map((layer) => layer.parameters)),
    },
    {
      id: "flops", label: "FLOPs", number: true, of: (layer) => layer.share_of_flops,
      ofBlock: (layers) => sum(layers.map((layer) => layer.share_of_flops)),
    },
  ];
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

const headroomOf = (layer) => (layer?.headroom ? toNumber(layer.headroom.bits) : null);

/** Returns the layer with the worst headroom. */
export function worstLayer(layers) {
  const rankOf = ({ headroom }) => headroom?.rank ?? Infinity;
  return layers.reduce((worst, layer) => (rankOf(layer) < rankOf(worst) ? layer : worst));
}

// Sorts layers by a column. Missing values are last in both directions.
export function sortLayers(layers, valueOf, descending) {
  const order = descending ? -1 : 1;
  const isMissing = (value) => value === null || value === undefined;
  return layers.map((layer) => ({ layer, value: valueOf(layer) })).sort(({ value: one }, { value: other }) => {
    if (isMissing(one) || isMissing(other)) return Number(isMissing(one)) - Number(isMissing(other));
    return one === other ? 0 : (one < other ? -1 : 1) * order;
  }).map(({ layer }) => layer);
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
  const [haystack, dtype] = [haystackOf(layer), layer.compute_dtype ?? ""];
  // A search for "float16" must not find "bfloat16".
  const types = [dtype, dtype.replace("float", "fp")];
  return text.toLowerCase().split(/\s+/).every((needle) => {
    return haystack.includes(needle) || types.some((type) => type.startsWith(needle));
  });
}
