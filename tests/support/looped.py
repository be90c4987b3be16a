"""An engine loop turned by hand, and everything it has said so far."""

from engine.loop import EngineLoop
from engine.scheduler import SchedulerLimits
from engine.types import GenerateRequest, SamplingParams


class Engine:
    """A loop, and everything it has said so far."""

    def __init__(self, executor, *, seqs=4, budget=16, chunk=4, clock=lambda: 0.0, **options):
        """seqs, budget, chunk: of SchedulerLimits. options: of EngineLoop."""
        self.executor = executor
        limits = SchedulerLimits(
            max_num_seqs=seqs, prefill_budget=budget, mixed_budget=seqs + budget, prefill_chunk=chunk
        )
        self.loop = EngineLoop(executor, limits, clock=clock, **options)
        self.updates = []

    def submit(self, name, prompt, **fields):
        sampling = SamplingParams(**fields.pop("sampling", {}))
        self.loop.submit(GenerateRequest(name, tuple(prompt), sampling=sampling, **fields))

    def step(self):
        news = self.loop.step()
        self.updates += news
        return news

    def run(self, limit=10_000):
        while self.loop.has_work():
            self.step()
            limit -= 1
            assert limit, "the engine does not come to an end"
        return self

    def of(self, name, index=0):
        return [update for update in self.updates if (update.request_id, update.index) == (name, index)]

    def tokens(self, name, index=0):
        return [token for update in self.of(name, index) for token in update.token_ids]

    def finish(self, name, index=0):
        ends = [update.finish for update in self.of(name, index) if update.finish]
        assert len(ends) == 1, ends
        assert self.of(name, index)[-1].finish == ends[0], "nothing follows an end"
        return ends[0]

    def cached(self, name, index=0):
        """Prompt tokens that were there already."""
        (count,) = [update.cached_tokens for update in self.of(name, index) if update.cached_tokens is not None]
        return count

    def holds_nothing(self):
        """But for the prefixes, which are forgotten here."""
        self.loop.reset_prefix_cache()
        return self.executor.free_cells == self.executor.total_cells and not self.executor.sessions
