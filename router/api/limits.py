"""The limits of the HTTP API: the documented defaults, each with its name. Over one, the answer is 400, if nothing else is said."""

from __future__ import annotations

# Transport
BODY_BYTES_MAX = 8 * 1024 * 1024  # else 413
BODY_BYTES_READING_MAX = 32 * 1024 * 1024  # of all bodies being read by this router; then reading pauses
BODY_BYTES_UNCOUNTED = 64 * 1024  # the beginning of each body: ordinary requests never wait for others
BODY_SECONDS_MAX = 30.0  # to arrive, else 408
HEADER_BYTES_MAX = 64 * 1024  # else 431
HEADER_FIELDS_MAX = 100  # else 431
REQUEST_ID_CHARACTERS_MAX = 128
UNSENT_BYTES_MAX = 256 * 1024  # per stream, behind the message being sent; then it is cut
JSON_DEPTH_MAX = 64  # the root is 1

# Errors
ERROR_BODY_BYTES_MAX = 16 * 1024
ERRORS_SHOWN_MAX = 5

# Prompts
MESSAGES_MAX = 2_048
CONTENT_PARTS_MAX = 2_048  # of one message
CHOICES_MAX = 128  # n × prompts of the body
TEXT_INLINE_BYTES_MAX = (
    8 * 1024
)  # of the body: its text is done at once on the loop, in 1 to 4 ms at most; a thread's hand-off costs 0.5 to 0.8 ms
IDS_INLINE_BYTES_MAX = 64 * 1024  # the same of prompts in token ids, which are only hashed: 1 ms
TEXT_JOBS_RUNNING_MAX = 2  # threads that render and encode
TEXT_JOBS_WAITING_MAX = 256  # beyond it, 429

# Sampling
MAX_TOKENS_MAX = 2**31 - 1
COMPLETION_TOKENS_DEFAULT = 16
TEMPERATURE_MAX = 2.0
REPETITION_PENALTY_MAX = 2.0
PENALTY_MAX = 2.0  # presence, frequency: ± this
TOP_LOGPROBS_MAX = 20
STOP_STRINGS_MAX = 16
STOP_CHARACTERS_MAX = 1_024
STOP_TOKEN_IDS_MAX = 256
TOKEN_IDS_MAX = 524_288  # of /detokenize and allowed_token_ids: above every vocabulary and context
BAD_WORDS_MAX = 256
BAD_WORD_CHARACTERS_MAX = 1_024
LOGIT_BIAS_MAX = 1_024
LOGIT_BIAS_VALUE_MAX = 100.0  # ± this
PRIORITY_MAX = 2**31 - 1  # ± this
CACHE_SALT_CHARACTERS_MAX = 256
CLASS_CHARACTERS_MAX = 64
QUEUE_TIME_SLO_MS_MAX = 600_000.0
TTFT_SLO_MS_MAX = 600_000.0
TPOT_SLO_MS_MAX = 60_000.0
IMPOSSIBLE_LOGPROB = -9999.0  # JSON has no −∞
