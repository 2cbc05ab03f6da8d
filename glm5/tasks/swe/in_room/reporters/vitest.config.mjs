// The repository's own configuration is not read.
export default {
  cacheDir: process.env.VITEST_SCRATCH + "/cache",
  resolve: { alias: JSON.parse(process.env.VITEST_ALIASES) },
  test: {
    watch: false,
    pool: "forks",
    poolOptions: { forks: { singleFork: true } },
    isolate: false, // one evaluation of the sources for all files
    passWithNoTests: false,
    include: ["**/*.{test,spec}.?(c|m)[jt]s?(x)", "**/test{,s}/**/*.?(c|m)[jt]s?(x)", "**/__tests__/**/*.?(c|m)[jt]s?(x)"],
    setupFiles: [new URL("vitest.setup.mjs", import.meta.url).pathname],
  },
};
