// One script, one style sheet, no hashes in their names: what is committed changes only where it changes.
import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  build: {
    outDir: "../palestra/dashboard/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "app.js", assetFileNames: "app[extname]", inlineDynamicImports: true },
    },
  },
  esbuild: { jsx: "automatic", jsxImportSource: "preact", legalComments: "none" },
  server: { proxy: { "/api": "http://127.0.0.1:6070" } },
});
