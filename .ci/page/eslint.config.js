import js from "@eslint/js";
import globals from "globals";

export default [
  {
    files: ["keras_mixprec/tensorboard_plugin/static/*.js"],
    ...js.configs.recommended,
    languageOptions: {
      ecmaVersion: 2022,
      sourceType: "module",
      globals: globals.browser,
    },
    rules: {
      // `const { kind, ...rest } = event` leaves `kind` out of the rest.
      "no-unused-vars": ["error", { ignoreRestSiblings: true }],
    },
  },
];
