"""The words people use for states, in the languages we met them in, and what column names mean.

A value is read word by word: ``EN_ATTENTE``, ``inProgress`` and ``not-started`` are words with something between
them. What is not in the lists is read by its form, with less trust: English ``-ing`` goes on, ``-ed`` is over.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from ..declare.states import CANCELED, DEAD, DONE, READY, RETRY, RUNNING

#: Of what a word may mean beside a lane's own states: something failed, or somebody holds the row back.
FAILED, HELD = "failed", "held"

#: Class of state -> words, the most usual first. Accents are dropped, words are joined by one space.
_WORDS: dict[str, str] = {
    READY: """
        pending, queued, new, todo, to do, waiting, not started, ready, created, open, initial, unprocessed, enqueued,
        available, scheduled, submitted, received, idle, backlog, unstarted, requested, to process, needs processing,
        init, planned, inbox, unsent, not processed, not sent, outstanding, unhandled, registered, fresh, awaiting,
        en attente, a traiter, nouveau, nouvelle, prevu, a faire, cree, recu,
        pendiente, en espera, nuevo, nueva, por procesar, en cola, creado, recibido,
        wartend, offen, neu, ausstehend, geplant, zu erledigen, angelegt, erstellt, unbearbeitet,
        in attesa, nuovo, nuova, da fare, da elaborare, creato,
        pendente, aguardando, novo, nova, na fila, a fazer,
        wachtend, nieuw, te doen, openstaand, oczekujacy, oczekuje, nowy, nowe,
        novy, nova zadost, ceka, vantar, venter, odottaa, uusi, bekliyor, yeni, beklemede,
        ожидает, в ожидании, новый, новая, новое, в очереди, ожидание, новые, очікує, новий,
        待处理, 等待, 等待中, 排队中, 新建, 未处理, 待機中, 未処理, 新規, 保留中, 대기, 대기중, 신규
    """,
    RUNNING: """
        running, processing, in progress, active, started, working, executing, doing, claimed, locked, busy, inflight,
        in flight, in process, wip, in work, taken, picked, picked up, reserved, acquired, dispatched, underway,
        assigned, leased, ongoing, begun, being processed, on it,
        en cours, en traitement, en cours de traitement, demarre, traitement,
        en proceso, en curso, procesando, en progreso, en ejecucion, iniciado,
        laufend, laeuft, lauft, in bearbeitung, in arbeit, aktiv, gestartet, wird bearbeitet,
        in corso, in elaborazione, in lavorazione, avviato,
        em andamento, processando, em processamento, em execucao, em progresso,
        bezig, in behandeling, lopend, w toku, w trakcie, przetwarzanie, przetwarzane, bezi, zpracovava se, probiha,
        pagar, pagaende, pagar nu, kaynnissa, isleniyor, calisiyor,
        в работе, в процессе, выполняется, обрабатывается, обработка, виконується, в роботі,
        处理中, 进行中, 运行中, 執行中, 执行中, 実行中, 処理中, 進行中, 처리중, 진행중, 실행중
    """,
    DONE: """
        done, completed, complete, succeeded, success, finished, processed, successful, ok, finalized, closed, resolved,
        passed, fulfilled, delivered, sent, published, shipped, archived, ended, terminated ok, ready to use, good,
        termine, terminee, complet, complete, fini, traite, traitee, reussi, succes, acheve, envoye,
        completado, completada, terminado, terminada, hecho, procesado, procesada, finalizado, exito, listo, enviado,
        fertig, erledigt, abgeschlossen, beendet, erfolgreich, verarbeitet, bearbeitet, versendet, gesendet,
        completato, completata, finito, fatto, elaborato, terminato, inviato, concluso,
        concluido, concluida, feito, processado, finalizado, sucesso, completo,
        klaar, voltooid, afgerond, gereed, verwerkt, zakonczone, zakonczony, gotowe, ukonczone, wykonane,
        hotovo, dokonceno, zpracovano, klar, fardig, slutford, ferdig, faerdig, valmis, tamamlandi, bitti,
        выполнено, готово, завершено, завершен, завершён, обработано, успешно, сделано, виконано, завершений,
        完成, 已完成, 成功, 已处理, 完了, 処理済み, 処理済, 済, 완료, 성공
    """,
    RETRY: """
        retry, retrying, retryable, to retry, retry scheduled, waiting retry, retry pending, pending retry, rescheduled,
        will retry, retry later, backoff, temporary failure, requeued, reintentar, a reessayer, wiederholen
    """,
    FAILED: """
        failed, error, errored, failure, faulted, crashed, fail, err, timed out, timeout, unsuccessful, broken,
        echec, echoue, erreur, en erreur,
        fallido, fallida, fallo, error, con error, erroneo,
        fehlgeschlagen, fehler, fehlerhaft, gescheitert,
        fallito, fallita, errore, falhou, falha, erro, mislukt, fout, gefaald, blad, nieudane, chyba, selhalo,
        misslyckades, fel, feil, fejl, virhe, epaonnistui, hata, basarisiz,
        ошибка, неудача, провалено, сбой, помилка,
        失败, 失敗, 错误, 錯誤, エラー, 실패, 오류
    """,
    DEAD: """
        dead, dead letter, deadletter, dead lettered, exhausted, discarded, given up, gave up, abandoned, fatal, poison,
        permanently failed, failed permanently, permanent failure, permanent error, unrecoverable, buried, dlq,
        max retries exceeded, failed final, mort, abandonne, muerto, aufgegeben
    """,
    CANCELED: """
        canceled, cancelled, aborted, skipped, ignored, expired, rejected, revoked, stopped, killed, deleted, voided,
        superseded, duplicate, invalid, declined, removed,
        annule, annulee, ignore, cancelado, cancelada, abgebrochen, storniert, annullato, annullata, geannuleerd,
        anulowane, zruseno, avbruten, iptal, отменено, отменен, отменён, скасовано, 已取消, 取消, キャンセル, 취소
    """,
    HELD: """
        draft, paused, on hold, hold, blocked, suspended, held, inactive, disabled, unknown, none, review, in review,
        needs review, approval, awaiting approval, pending approval, pending review, template, frozen, quarantined,
        brouillon, borrador, entwurf, bozza, rascunho, черновик, 草稿, 下書き
    """,
}


@dataclass(frozen=True)
class WordMeaning:
    """The meaning of a word for a state: how sure it is, from 0 to 1, and how usual the word is, 0 first."""

    state: str
    sure: float
    rank: int
    why: str


def words(text: str) -> str:
    """Lower-case words without accents, joined by a space: ``EN_ATTENTE`` and ``enAttente`` are ``en attente``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", str(text))
    plain = unicodedata.normalize("NFKD", apart.casefold())
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    plain = plain.replace("ø", "o").replace("ł", "l").replace("ı", "i")
    return " ".join(re.findall(r"[^\W_]+", plain))


def _lists() -> dict[str, tuple[str, int]]:
    by_word: dict[str, tuple[str, int]] = {}
    for state, text in _WORDS.items():
        for rank, word in enumerate(part.strip() for part in text.split(",")):
            by_word.setdefault(words(word), (state, rank))
    return by_word


_KNOWN = _lists()
#: One letter for a state, as old tables have it; worth something only beside others.
LETTERS = {"p": READY, "n": READY, "q": READY, "w": READY, "r": RUNNING, "d": DONE, "c": DONE, "s": DONE,
           "f": FAILED, "e": FAILED, "x": CANCELED}  # fmt: skip


#: Words for done that are as often said of what happens to a row later on.
_AFTERWARDS = {"archived", "closed", "ended", "good", "ready to use"}

#: Ready words that are also said of things that nobody works on.
_OF_THINGS = {"ready", "created", "open", "initial", "available", "scheduled", "submitted", "received", "idle", "init",
              "requested", "planned", "inbox", "outstanding", "registered", "fresh", "cree", "recu", "creado",
              "recibido", "offen", "angelegt", "erstellt", "creato", "geplant", "prevu"}  # fmt: skip


def of_things(value: object) -> bool:
    """Whether a word for ready may also describe a thing: available, open, received."""
    return words(str(value)) in _OF_THINGS


def meaning(value: object) -> WordMeaning | None:
    """The meaning of a value as a state; None if it has none."""
    text = words(str(value))
    if not text:
        return None
    if text in _KNOWN:
        state, rank = _KNOWN[text]
        return WordMeaning(state, 0.4 if text in _AFTERWARDS else 1.0, rank, f"{value!r} is a usual word for {state}")
    parts = text.split()
    # A known word beside others: "job_failed", "pending_review" (held, above), "extraction complete", "ocr processing".
    for size in range(min(3, len(parts) - 1), 0, -1):
        for edge in (parts[-size:], parts[:size]):
            known = _KNOWN.get(" ".join(edge))
            if known is not None:
                return WordMeaning(known[0], 0.7, 50 + known[1], f"{value!r} has the word {' '.join(edge)!r}")
    last, first = parts[-1], parts[0]
    for word in (last, first):
        if word.isascii() and len(word) > 4:
            if word.endswith("ing"):
                return WordMeaning(RUNNING, 0.5, 200, f"{value!r} looks like a running state (-ing)")
            if word.endswith("ed"):
                return WordMeaning(DONE, 0.4, 200, f"{value!r} looks like a final state (-ed)")
    return None


#: Names of columns that hold a state, with how much that says.
_STATE_NAMES = {
    **dict.fromkeys(("status", "state"), 1.0),
    **dict.fromkeys(("job status", "job state", "task status", "processing status", "process status", "queue status",
                     "work status", "run status", "processing state", "task state", "workflow state"), 1.0),
    **dict.fromkeys(("statut", "etat", "estado", "zustand", "stato", "situacao", "stan", "stav", "tila", "durum",
                     "статус", "состояние", "стан", "状态", "狀態", "ステータス", "状態", "상태"), 1.0),
    **dict.fromkeys(("stage", "phase", "step", "progress status", "stat", "st", "etape", "fase", "aasm state"), 0.7),
}  # fmt: skip


def state_name(name: str) -> float:
    """How likely a column is a state by its name, from 0 to 1."""
    text = words(name)
    for noise in (" id", " code", " cd", " flag", " value", " name", " key", " no", " nr"):
        text = text.removesuffix(noise)
    if text in _STATE_NAMES:
        return _STATE_NAMES[text]
    last = text.split()[-1] if text else ""
    return 0.8 * _STATE_NAMES.get(last, 0.0)


def lookup_name(table: str) -> float:
    """How likely a table lists states by its name: ``statuses``, ``job_states``, ``statuts``."""
    return max(state_name(table.removesuffix(ending)) for ending in ("", "s", "es", "S", "ES"))


def event_name(name: str) -> WordMeaning | None:
    """The meaning of a flag's or a time's name: ``is_processed`` and ``processed_at`` mean done."""
    text = words(name)
    text = re.sub(r"^(is|was|has been|has|been|date|time|ts|dt) ", "", text)
    text = re.sub(r" (at|on|time|date|ts|dt|flag|timestamp|datetime|utc|yn)$", "", text)
    meant = meaning(text)
    # As the name of a column these mean something about the thing, not about the work on it.
    things = ("active", "open", "new", "available", "closed", "good", "ok", "archived", "ended", "assigned")
    return None if text in things else meant


def time_name(name: str) -> bool:
    """Whether a column's name says that it holds a time, whatever its type: ``locked_at``, ``date_started``."""
    text = words(name)
    return re.search(r"(^(date|time|ts|dt) | (at|on|time|date|ts|dt|timestamp|datetime|utc)$)", text) is not None


#: Running words that belong with a ready word, where a table has none of its own yet.
_PARTNERS = {
    "pending": ("processing", "done", "failed"),
    "queued": ("running", "succeeded", "failed"),
    "todo": ("doing", "done", "failed"),
    "to do": ("in progress", "done", "failed"),
    "not started": ("in progress", "completed", "failed"),
    "open": ("in progress", "done", "failed"),
    "en attente": ("en traitement", "termine", "erreur"),
    "a traiter": ("en traitement", "traite", "erreur"),
    "nouveau": ("en cours", "termine", "erreur"),
    "pendiente": ("procesando", "completado", "error"),
    "offen": ("in bearbeitung", "erledigt", "fehler"),
    "neu": ("in bearbeitung", "erledigt", "fehler"),
    "wartend": ("laufend", "fertig", "fehler"),
    "in attesa": ("in corso", "completato", "errore"),
    "pendente": ("processando", "concluido", "erro"),
    "ожидает": ("в работе", "готово", "ошибка"),
    "待处理": ("处理中", "已完成", "失败"),
    "未処理": ("処理中", "完了", "失敗"),
}


def partner(ready: str, state: str) -> str:
    """A word for running, done or failed that goes with a table's own ready word."""
    partners = _PARTNERS.get(words(ready), ("processing", "done", "failed"))
    return {RUNNING: partners[0], DONE: partners[1], FAILED: partners[2]}[state]


def styled(word: str, like: str) -> str:
    """A word in another's style: ``IN_PROGRESS`` beside ``PENDING``, ``inProgress`` beside ``notStarted``."""
    parts = word.split()
    if like.isupper():
        return (next((c for c in like if c in "_- "), "_")).join(parts).upper()
    if re.search(r"[a-z][A-Z]", like):
        joined = "".join(p.capitalize() for p in parts)
        return joined if like[0].isupper() else joined[0].lower() + joined[1:]
    between = next((c for c in like if c in "_- "), "_")
    if like[:1].isupper():
        return between.join(p.capitalize() for p in parts)
    return between.join(parts)


#: Parts of column names that mean the same, by the one they are read as.
_SAME_PARTS = {
    "at": "on ts dt tm dttm time date datetime timestamp tstamp utc",
    "count": "cnt ct num number no nr nb qty counter total n",
    "error": "err errors exc",
    "message": "msg txt text descr description detail details info reason",
    "attempt": "attempts att atts",
    "try": "tries trials",
    "retry": "retries rtry",
    "failure": "failures fail fails",
    "worker": "wrk wkr wrkr",
    "heartbeat": "hb hbeat",
    "priority": "prio prty",
    "processing": "proc prc process",
    "locked": "lck lckd lock",
    "picked": "pickedup pick pickup",
    "claimed": "claim",
    "reserved": "reserve",
    "started": "start strt begin began",
    "finished": "finish fin end ended",
    "completed": "complete compl cmpl completion",
    "created": "create crt cre creation",
    "updated": "update upd updt",
    "modified": "modify mod modif",
    "next": "nxt",
    "last": "lst",
    "scheduled": "sched schedule",
    "maximum": "max",
    "id": "uuid guid key",
    "name": "nm",
}  # fmt: skip
_PARTS = {part: same for same, parts in _SAME_PARTS.items() for part in parts.split()}
#: Parts that say nothing about a role.
_FILLERS = {"up", "out", "of", "the", "job", "task", "row", "item", "is"}


def parts(name: str) -> frozenset[str]:
    """A column's name by its parts, abbreviations spelled out: ``pickedUpTs`` is picked and at."""
    return frozenset(_PARTS.get(part, part) for part in words(name).split() if part not in _FILLERS)


def means(role: str, name: str) -> bool:
    """Whether a column's name means a role: by its parts, in any order."""
    return parts(name) in _ROLE_PARTS[role] and words(name) not in ("start date", "end date")


def may_mean(role: str, name: str) -> bool:
    """Whether a column's name means a role, with one more part that may say of what."""
    named = parts(name)
    return any(len(meant) > 1 and meant < named and len(named - meant) == 1 for meant in _ROLE_PARTS[role]) and not (
        named & {"maximum", "last", "next", "first"}
    )


#: Names that mean a role, beyond those that a lane takes by itself, the surest first.
ROLE_NAMES: dict[str, tuple[str, ...]] = {
    "worker": ("worker", "locked_by", "worker_id", "claimed_by", "picked_by", "reserved_by", "lock_owner",
               "picked_up_by", "processed_by", "processing_by", "handled_by", "held_by", "worker_name", "worker_host",
               "lease_owner", "leased_by", "lock_id", "taken_by", "grabbed_by",
               "runner", "runner_id", "executor", "executor_id", "processor_id", "node", "hostname"),
    "claimed_at": ("claimed_at", "locked_at", "started_at", "processing_started_at", "picked_at", "picked_up_at",
                   "reserved_at", "attempted_at", "processing_at", "started", "run_started_at",
                   "job_started_at", "started_on", "last_started_at", "date_started", "begun_at",
                   "leased_at", "acquired_at", "taken_at", "grabbed_at", "dequeued_at", "last_attempt_at",
                   "last_attempted_at", "start_time", "lock_time", "last_run_at"),
    "heartbeat_at": ("heartbeat_at", "last_heartbeat_at", "last_heartbeat", "heartbeat", "last_seen_at", "last_ping_at",
                     "pinged_at", "keepalive_at", "last_alive_at"),
    "attempts": ("attempts", "attempt_count", "attempts_count", "num_attempts", "attempts_made", "tries", "try_count",
                 "attempt", "number_of_attempts", "run_count", "execution_count", "n_attempts", "attempt_number",
                 "retry_count", "retries"),
    "failures": ("failures", "failure_count", "error_count", "fail_count", "failed_attempts", "failures_count",
                 "retry_count", "retries"),
    "reclaims": ("reclaims",),
    "max_attempts": ("max_attempts", "attempts_max", "max_tries", "attempt_limit", "maximum_attempts"),
    "expires_at": ("expires_at",),
    "run_after": ("run_after", "next_retry_at", "run_at", "scheduled_at", "scheduled_for", "available_at",
                  "next_attempt_at", "next_run_at", "not_before", "process_after", "visible_at", "retry_at",
                  "retry_after", "execute_at", "send_at", "process_at", "next_try_at", "next_try", "next_attempt",
                  "scheduled_time",
                  "scheduled_on", "schedule_at", "available_after", "wait_until", "available_from"),
    "error": ("error", "last_error", "error_message", "error_msg", "failure_reason", "error_text", "err_msg",
              "exception", "last_exception", "fail_reason", "error_details", "error_detail", "last_error_message",
              "failure_message", "error_description", "errors", "error_info", "erreur", "fehler", "error_log",
              "failure"),
    "finished_at": ("finished_at", "completed_at", "ended_at", "finished_on", "completed_on", "completion_time",
                    "finish_time", "date_completed", "date_finished", "ended_on", "finished", "ended",
                    "processing_finished_at", "processing_ended_at"),
    "updated_at": ("updated_at", "modified_at", "updated", "modified", "last_modified", "updated_on", "modified_on",
                   "last_updated", "date_modified", "date_updated", "changed_at", "last_updated_at", "last_modified_at",
                   "update_time", "updated_time", "mtime"),
    "priority": ("priority",),
    "progress": ("progress",),
    "traceparent": ("traceparent", "trace_parent"),
}  # fmt: skip

#: Columns that say when a row was made, beyond those that a lane orders by without being told.
BIRTHS = ("created_at", "inserted_at", "created", "created_on", "enqueued_at", "queued_at", "submitted_at",
          "received_at", "added_at", "date_created", "created_time", "create_time", "creation_date", "date_added",
          "created_date", "createdon", "requested_at", "timestamp", "ts", "event_time", "occurred_at",
          "date_joined", "uploaded_at", "ordered_at", "imported_at", "registered_at", "inserted", "added", "enqueued",
          "submitted", "received")  # fmt: skip

_ROLE_PARTS = {role: {parts(name) for name in names} for role, names in ROLE_NAMES.items()}
_BIRTH_PARTS = [parts(name) for name in BIRTHS]


def birth_rank(name: str) -> int | None:
    """How usual a name is for a row's creation time, 0 first; None: it means something else."""
    named = parts(name)
    return _BIRTH_PARTS.index(named) if named in _BIRTH_PARTS else None
