"""A task set for verifiers: repeat a word; three turns if it is asked to be kind."""

import itertools

import verifiers.v1 as vf

__all__ = ["Words"]
WORDS = ["".join(letters) for letters in itertools.product("abc", repeat=3)]


class WordData(vf.TaskData):
    word: str


class Word(vf.Task[WordData]):
    @vf.reward
    async def repeated(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.word)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Words(vf.Taskset[Word]):
    def load(self):
        for word in WORDS:
            data = WordData(word=word, prompt=f"say {word}", system_prompt="You repeat what you hear.")
            yield Word(data, self.config.task)


async def broken(trace: vf.Trace) -> float:
    raise RuntimeError("out of order")
