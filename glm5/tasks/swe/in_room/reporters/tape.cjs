// Runs files of tape's tests in one process: one JSON line per test; see suite.py.
const fs = require("fs");
const { inspect } = require("util");
const [modules, report, ...files] = process.argv.slice(2);
const out = fs.openSync(report, "w");
const write = (row) => fs.writeSync(out, JSON.stringify(row) + "\n");
const owners = [];
const open = new Map();
const close = (test) => {
  open.delete(test.id);
  const bad = test.failed[0];
  const told = bad && `${bad.name}\n  operator: ${bad.operator}\n  expected: ${inspect(bad.expected)}\n  actual:   ${inspect(bad.actual)}`;
  const outcome = test.skip ? "skipped" : bad ? "failed" : "passed";
  const seconds = (performance.now() - test.start) / 1000;
  write({ file: test.file, titles: test.titles, outcome, seconds, message: told ?? "", stack: String(bad?.error?.stack ?? "") });
};
process.on("exit", () => {
  for (const test of [...open.values()]) {
    test.failed.push({ name: "the test did not end", operator: "end" });
    close(test);
  }
  write({ end: true });
});
const tape = require(`${modules}/tape`);
const known = new Map();
tape.createStream({ objectMode: true }).on("data", (row) => {
  if (row.type === "test") {
    const parent = known.get(row.parent);
    const file = parent ? parent.file : owners.shift();
    const titles = [...(parent ? parent.titles : []), String(row.name)];
    const test = { id: row.id, file, titles, skip: row.skip || row.todo, failed: [], start: performance.now() };
    known.set(row.id, test);
    open.set(row.id, test);
  } else if (row.type === "assert" && !row.ok && !row.todo && !row.skip) {
    known.get(row.test)?.failed.push(row);
  } else if (row.type === "end" && open.has(row.test)) {
    close(open.get(row.test));
  }
});
for (const file of files) {
  const before = tape.getHarness()._results.tests.length;
  try {
    require(fs.realpathSync(file));
  } catch (error) {
    write({ broken: true, file, message: String(error?.stack ?? error) });
    process.exitCode = 1;
  }
  owners.push(...Array(tape.getHarness()._results.tests.length - before).fill(file));
}
