"""Processes whose machine's wall clock is minutes ahead."""

from __future__ import annotations

import subprocess
from pathlib import Path

AHEAD_S = 300
SHIFTED_CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *at) {
  int failed = syscall(SYS_clock_gettime, id, at);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += AHEAD_S;
  return failed;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


def shifted_clock(folder: Path) -> dict[str, str]:
    """Returns the environment of processes whose wall clock is ahead."""
    source, made = folder / "clock.c", folder / "clock.so"
    source.write_text(SHIFTED_CLOCK)
    command = ["cc", "-shared", "-fPIC", f"-DAHEAD_S={AHEAD_S}", str(source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(made)}
