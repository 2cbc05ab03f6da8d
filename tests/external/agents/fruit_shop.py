"""An environment for `verifiers`: a taskset, a tool server and a reward."""

import verifiers.v1 as vf


class PriceToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "shop"

    @vf.tool
    def price(self, fruit: str) -> str:
        """The price of a fruit in cents."""
        return {"apple": "40", "pear": "55"}.get(fruit, "not sold")


class ShopData(vf.TaskData):
    answer: str


class ShopTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class ShopTask(vf.Task[ShopData, vf.State, ShopTaskConfig]):
    @classmethod
    def toolsets(cls, config: ShopTaskConfig) -> list[vf.Toolset]:
        return [PriceToolset(config.tools)]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class ShopConfig(vf.TasksetConfig):
    task: ShopTaskConfig = ShopTaskConfig()


class ShopTaskset(vf.Taskset[ShopTask, ShopConfig]):
    def load(self) -> list[ShopTask]:
        prompt = "What do an apple and a pear cost together, in cents?"
        return [ShopTask(ShopData(prompt=prompt, system_prompt="You sell fruit.", answer="95"), self.config.task)]


__all__ = ["ShopTaskset"]

if __name__ == "__main__":
    PriceToolset.run()
