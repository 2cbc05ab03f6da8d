import { Service } from "./service";

declare const require: (name: string) => { readFileSync(path: number, encoding: string): string };

const service = new Service();
const lines = require("fs").readFileSync(0, "utf8").split("\n");
lines.pop();
for (const line of lines) console.log(service.answer(line.split(/\s+/).filter((word) => word !== "")));
