import assert from "node:assert/strict";
import { test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

const folder = fileURLToPath(
  new URL("../keras_mixprec/tensorboard_plugin/static", import.meta.url),
);
const load = (name) => import(pathToFileURL(`${folder}/${name}.js`).href);

const { skippedInWords } = await load("skips");

test("skipped steps are counted between the rows of the loss scale, too", () => {
  // At the floor there is a row for each reading; each step of 3 to 50 was skipped.
  const line = { steps: [0, 2, 3, 50, 100], scale: [4, 2, 1, 1, 1], skipped: [0, 1, 2, 49, 60] };
  const said = [0, 1, 2, 3, 29, 50, 99, 100, 120].map((step) => skippedInWords(line, step));
  assert.deepEqual(said, [
    "0 skipped so far", "0 skipped so far", "1 skipped so far", "2 skipped so far",
    "28 skipped so far", "49 skipped so far", "49 skipped up to step 50, 60 up to step 100",
    "60 skipped so far", "60 skipped so far",
  ]);
});
