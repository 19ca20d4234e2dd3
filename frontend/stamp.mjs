// Writes what the built page was built from, so that a test can tell when it is older than its sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";

const files = ["index.html", "package-lock.json", "vite.config.ts", ...readdirSync("src").sort().map((name) => `src/${name}`)];
const hash = createHash("sha256");
for (const file of files) hash.update(`${file}\0`).update(readFileSync(file)).update("\0");
writeFileSync("../palestra/dashboard/static/sources.sha256", `${hash.digest("hex")}\n`);
