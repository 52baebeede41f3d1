"""verl's checkpoint engine: weights travel from the trainer through a chain of rollout workers.

Follows verl/checkpoint_engine/nixl_checkpoint_engine.py of 0.9.1, where the agent has the default
backend of NIXL: two buckets in each process, registered by their tensors; the owner of a bucket
sends its pickled descriptors with a key, the next process reads it and notifies the key; a middle
process is read by the next one while it reads from the one before. Each update registers and loads
everything anew, with the same agents.
"""

import pickle
import uuid

import numpy as np
from endpoint import DISCONNECTED, DONE, pattern

from .memory import GUARD
from .replay import SOON, Application, Expectation, Freed
from .tensors import tensor

BUCKET = 1 << 20
SIZE = 2 * BUCKET


class Rank(Application):
    def prepare(self):
        """Registers both buckets and describes this process."""
        buckets = [tensor(self.block, 0, BUCKET), tensor(self.block, BUCKET, BUCKET)]
        self.registered = [self.agent.register_memory(bucket) for bucket in buckets]
        self.descriptors = [self.agent.get_xfer_descs(bucket) for bucket in buckets]
        self.neighbours = []
        self.unread = []
        return self.agent.get_agent_metadata()

    def join(self, *neighbours):
        for metadata in neighbours:
            self.neighbours.append(self.agent.add_remote_agent(metadata).decode("utf-8"))

    def load(self, bucket, seed):
        """Fills a bucket with weights."""
        content = self.contents()
        content[GUARD + bucket * BUCKET :][:BUCKET] = pattern(seed, BUCKET)
        self.fill(content)

    def offer(self, bucket):
        """Returns the offer for the next process: a key, and the position of the bucket."""
        self.key = uuid.uuid4().bytes
        return self.key, pickle.dumps(self.descriptors[bucket])

    def was_read(self, by):
        """Waits for the key of the last offer."""
        while not self.unread:
            self.unread += self.notifications(1, SOON)
        return self.unread.pop(0) == (by, self.key)

    def begin(self, offer, owner, bucket):
        key, descriptors = offer
        mine, theirs = self.descriptors[bucket], pickle.loads(descriptors)
        self.handle = self.agent.initialize_xfer("READ", mine, theirs, owner, key)
        assert self.agent.transfer(self.handle) in ("PROC", DONE)

    def end(self, timeout=SOON):
        state = self.wait(self.handle, timeout)
        self.agent.release_xfer_handle(self.handle)
        self.handle = None
        return state

    def finalize(self):
        for name in self.neighbours:
            self.forget(name)
        for registered in self.registered:
            self.agent.deregister_memory(registered)


def test_chain(here, there, memory):
    trainer, last = there(Rank, "trainer", memory, SIZE, 1), there(Rank, "rollout-2", memory, SIZE, 3)
    middle = here(Rank, "rollout-1", memory, SIZE, 2)
    for update in range(2):
        first, second, third = trainer.prepare(), middle.prepare(), last.prepare()
        trainer.join(second)
        middle.join(first, third)
        last.join(second)
        at = [0, BUCKET]
        previous = None
        for number in range(3):
            own = number % 2
            trainer.load(own, seed=10 * update + number)
            expected = Expectation(trainer, middle, last)
            middle.begin(trainer.offer(own), "trainer", own)
            expected.moved(trainer, middle, [(at[own], at[own], BUCKET)])
            if previous is not None:  # the last process reads the bucket before, meanwhile
                last.begin(middle.offer(previous), "rollout-1", previous)
                expected.moved(middle, last, [(at[previous], at[previous], BUCKET)])
                assert last.end() == DONE
                assert middle.was_read("rollout-2")
            assert middle.end() == DONE
            assert trainer.was_read("rollout-1")
            expected.check()
            previous = own
        last.begin(middle.offer(previous), "rollout-1", previous)
        assert last.end() == DONE
        assert middle.was_read("rollout-2")
        weights = pattern(10 * update + 2, BUCKET)
        assert np.array_equal(last.contents()[GUARD + at[previous] :][:BUCKET], weights)
        for rank in (trainer, middle, last):
            rank.finalize()


def test_trainer_dies(here, there, memory):
    rollout = here(Rank, "rollout", memory, SIZE, 2)
    freed = Freed()
    trainer = there(Rank, "trainer", memory, SIZE, 1)
    metadata = trainer.prepare()
    rollout.prepare()
    rollout.join(metadata)
    rollout.begin(trainer.offer(0), "trainer", 0)
    assert rollout.end() == DONE
    assert freed.in_use()
    offer = trainer.offer(1)
    trainer.freeze()
    rollout.begin(offer, "trainer", 1)
    assert rollout.agent.check_xfer_state(rollout.handle) == "PROC"
    trainer.kill()
    assert rollout.end() == DISCONNECTED
    rollout.finalize()
    freed.check()

    # A new trainer under the name of the old one: the rollout worker has removed that.
    trainer = there(Rank, "trainer", memory, SIZE, 4)
    metadata = trainer.prepare()
    rollout.prepare()
    rollout.join(metadata)
    expected = Expectation(trainer, rollout)
    rollout.begin(trainer.offer(1), "trainer", 0)
    assert rollout.end() == DONE
    assert trainer.was_read("rollout")
    expected.moved(trainer, rollout, [(BUCKET, 0, BUCKET)])
    expected.check()
    rollout.finalize()
