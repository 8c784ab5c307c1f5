"""The Redis queues between frontends, scheduler and agents (Prism §6.3, §7.1).

One queue per device, one (`UNPLACED`) for models that are on no device. Redis stores and never
sorts. A request leaves Redis only when its agent acknowledges that it ended.
"""
