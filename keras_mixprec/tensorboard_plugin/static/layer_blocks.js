import { matchesFilter, sortLayers } from "./layer_columns.js";
import { foldersOf, shortNames } from "./names.js";

// Groups layers into blocks by the folders of their paths. A folder with one layer is not a block.
export function layerTree(layers) {
  const root = { path: "", nodes: new Map(), layers: [] };
  for (const layer of layers) {
    let node = root;
    let path = "";
    root.layers.push(layer);
    for (const part of layer.path.split("/")) {
      path = path ? `${path}/${part}` : part;
      if (!node.nodes.has(part)) {
        node.nodes.set(part, { path, nodes: new Map(), layers: [] });
      }
      node = node.nodes.get(part);
      node.layers.push(layer);
    }
  }
  return childrenOf(root);
}

function childrenOf(node) {
  return [...node.nodes.values()].map((child) => {
    let inner = child;
    // A folder that contains only one folder shares a row with the inner folder.
    while (inner.nodes.size === 1 && inner.layers.length > 1) {
      const [only] = inner.nodes.values();
      if (only.layers.length < inner.layers.length) break;
      inner = only;
    }
    if (inner.layers.length === 1) return { layer: inner.layers[0] };
    const own = inner.layers.filter((layer) => layer.path === inner.path);
    return {
      block: inner.path, layers: inner.layers,
      children: [...own.map((layer) => ({ layer })), ...childrenOf(inner)],
    };
  });
}

export function allBlocks(tree) {
  return tree.flatMap((node) => {
    return node.block === undefined ? [] : [node, ...allBlocks(node.children)];
  });
}

// Returns the outermost blocks that do not contain most of the model's layers.
export function blocksToFold(tree, count) {
  return tree.flatMap((node) => {
    if (node.block === undefined) return [];
    if (node.layers.length * 2 <= count) return [node.block];
    const inner = blocksToFold(node.children, count);
    return inner.length ? inner : [node.block];
  });
}

// Returns the outermost folded block that contains a layer, or null.
export function foldedBlockOf(path, folded) {
  return folded.size ? foldersOf(path).find((folder) => folded.has(folder)) ?? null : null;
}

// Returns the layers that the table and the heatmap show. A search opens all blocks.
export function layerChoice({ filter, onlyProblems, folded }) {
  const known = new Map();
  const isKept = (layer) => matchesFilter(layer, filter) && (!onlyProblems || layer.is_problem);
  return {
    keeps(layer) {
      if (!known.has(layer)) known.set(layer, isKept(layer));
      return known.get(layer);
    },
    folded: filter.trim() ? new Set() : folded,
  };
}

/**
 * Returns the rows of the table. A block comes before its layers.
 * @returns {{layer?: any, block?: string, depth: number, layers?: any[],
 *   folded?: boolean, within: string}[]}
 */
export function layerRows(tree, { keeps, folded }, column, descending, depth = 0, within = "") {
  const kept = tree.flatMap((node) => {
    if (node.block === undefined) return keeps(node.layer) ? [node] : [];
    const layers = node.layers.filter(keeps);
    return layers.length ? [{ ...node, layers }] : [];
  });
  const valueOf = (node) => {
    return node.block === undefined ? column.of(node.layer) : column.ofBlock(node.layers);
  };
  const ordered = column ? sortLayers(kept, valueOf, descending) : kept;
  return ordered.flatMap((node) => {
    if (node.block === undefined) return [{ layer: node.layer, depth, within }];
    const { block, layers, children } = node;
    const row = { block, layers, depth, within, folded: folded.has(block) };
    if (row.folded) return [row];
    const choice = { keeps, folded };
    return [row, ...layerRows(children, choice, column, descending, depth + 1, block)];
  });
}

// Returns the labels of a tree. Layers in a block omit the path of the block.
export function treeLabels(tree, length, within = "", labels = { block: new Map(), layer: new Map() }) {
  const pathOf = (node) => node.block ?? node.layer.path;
  const nameOf = (node) => {
    const path = pathOf(node);
    if (!within) return path;
    return path === within ? path.slice(path.lastIndexOf("/") + 1) : path.slice(within.length + 1);
  };
  const names = tree.map(nameOf);
  const short = shortNames(names, Math.max(12, length));
  tree.forEach((node, index) => {
    const kind = node.block === undefined ? "layer" : "block";
    labels[kind].set(pathOf(node), short.get(names[index]));
    if (node.block !== undefined) treeLabels(node.children, length - 2, node.block, labels);
  });
  return labels;
}
