"""Replay memory and a thread that keeps a few batches ready."""

import queue
import threading

import numpy as np
import torch


class Replay:
    def __init__(self, capacity, obs_dim, act_dim):
        self.obs, self.next_obs = (np.zeros((capacity, obs_dim), np.float32) for _ in range(2))
        self.act = np.zeros((capacity, act_dim), np.float32)
        self.rew, self.done = (np.zeros((capacity, 1), np.float32) for _ in range(2))
        self.capacity, self.size, self.at = capacity, 0, 0

    def add(self, obs, act, rew, next_obs, done):
        n = len(obs)
        idx = (self.at + np.arange(n)) % self.capacity
        self.obs[idx], self.act[idx], self.rew[idx, 0], self.next_obs[idx], self.done[idx, 0] = obs, act, rew, next_obs, done
        self.at, self.size = (self.at + n) % self.capacity, min(self.size + n, self.capacity)

    def sample(self, rng, n):
        idx = rng.integers(self.size, size=n)
        return {k: torch.from_numpy(getattr(self, k)[idx]) for k in ("obs", "act", "rew", "next_obs", "done")}


class Prefetcher:
    """An endless iterator over batches, which a thread prepares; `close` stops the thread."""

    def __init__(self, replay, batch_size, seed, depth=4):
        self.queue, self.stop = queue.Queue(depth), threading.Event()
        self.replay, self.batch_size, self.rng = replay, batch_size, np.random.default_rng(seed)
        self.thread = threading.Thread(target=self._run, daemon=True, name="prefetch")
        self.thread.start()

    def _run(self):
        while not self.stop.is_set():
            item = self.replay.sample(self.rng, self.batch_size)
            while not self.stop.is_set():
                try:
                    self.queue.put(item, timeout=0.1)
                    break
                except queue.Full:
                    pass

    def __iter__(self):
        return self

    def __next__(self):
        return self.queue.get()

    def close(self):
        self.stop.set()
        self.thread.join()
