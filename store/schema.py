"""The tables of a Receiver file, as steps that are only ever appended to.

Every table, index and trigger is prefixed `receiver_`, because the file may be the app's own.
The syntax stays within SQLite 3.37: an app that opens the file with an older library than ours
must be able to parse the whole schema, or it can read none of its own tables either.
"""

import apsw

from store.errors import NewerFile

#: An amount's limit, in units. Nine thousand such entries fit a balance.
AMOUNT_MAX = 10**15

EVENTS = """
create table receiver_events (
  id integer primary key,
  -- the identity, the account ('' for the sender's own) and the sender's id: the event key
  source text not null check (source <> ''),
  account text not null,
  event_id text not null check (event_id <> ''),
  -- the source's name that it came in by; its rules and mode judge the event again
  endpoint text not null check (endpoint <> ''),
  type text not null,
  state text not null
    check (state in ('pending', 'done', 'ignored', 'parked', 'quarantined', 'dead')),
  reason text,
  duplicates integer not null check (duplicates >= 0),
  attempts integer not null check (attempts >= 0),
  -- null: not due. Only what is pending can be due.
  next_attempt_ms integer check (next_attempt_ms is null or state = 'pending'),
  -- 1: a queued event, or one whose handler failed: applied by a worker, under a lease
  by_worker integer not null check (by_worker in (0, 1)),
  last_error text,
  received_ms integer not null,
  -- when it was first written, and what its first delivery was answered
  stored_ms integer not null,
  answer text not null,
  settled_ms integer,
  -- the reference of the secret that matched, never the secret
  secret text not null,
  content_type text not null check (content_type in ('json', 'form')),
  body_sha256 blob not null check (length(body_sha256) = 32),
  -- 0: the id came from an unsigned header, so the same body may come again under another id
  id_signed integer not null check (id_signed in (0, 1)),
  same_body_as integer,
  -- what an unsigned header said the account is; never part of a key
  claimed_account text,
  -- reconcile: it was read from the sender's API, over a connection that proves who answers
  origin text not null check (origin in ('delivery', 'reconcile')),
  -- the workspace that the operator attributed the event to
  workspace text check (workspace <> ''),
  request_id text not null,
  lease_owner text,
  lease_until_ms integer,
  unique (source, account, event_id),
  check ((settled_ms is not null) = (state in ('done', 'ignored', 'dead'))),
  check ((lease_owner is null) = (lease_until_ms is null)),
  check (lease_owner is null or state = 'pending')
) strict;

create index receiver_events_released on receiver_events (id)
  where next_attempt_ms is not null and by_worker = 0;
create index receiver_events_queued on receiver_events (next_attempt_ms)
  where next_attempt_ms is not null and by_worker = 1;
create index receiver_events_unfinished on receiver_events (state, id)
  where state in ('pending', 'parked', 'quarantined', 'dead');
-- Each kind of event is one range of it, in the order of receipt.
create index receiver_events_kind on receiver_events (endpoint, type, state);
create index receiver_events_workspace on receiver_events (workspace) where workspace is not null;
create index receiver_events_flagged on receiver_events (id) where same_body_as is not null;
create index receiver_events_same_body on receiver_events (source, body_sha256)
  where id_signed = 0;

-- Apart from the event, so that states change without rewriting bodies, and pruning is a delete.
create table receiver_payloads (
  event integer primary key,
  body blob not null
) strict;

-- Redeliveries of an event, the newest twenty: the event itself has its first delivery, and
-- `duplicates` counts them all.
create table receiver_deliveries (
  event integer not null,
  slot integer not null check (slot between 0 and 19),
  received_ms integer not null,
  stored_ms integer not null,
  answer text not null,
  secret text not null,
  request_id text not null,
  primary key (event, slot)
) strict, without rowid;

create index receiver_deliveries_request on receiver_deliveries (request_id);

-- What a parked event waits for: a link (key is the customer), a ledger entry (key is its
-- subject), a resource (key is its id, operation its kind) or, without a customer to wait for,
-- the operator.
create table receiver_parked (
  event integer primary key,
  kind text not null check (kind in ('link', 'entry', 'resource', 'attribution')),
  source text not null,
  account text not null,
  key text not null,
  operation text not null,
  since_ms integer not null,
  check ((kind in ('entry', 'resource')) = (operation <> ''))
) strict;

create index receiver_parked_since on receiver_parked (since_ms);
create index receiver_parked_on
  on receiver_parked (kind, source, account, key, operation);

create trigger receiver_events_no_delete before delete on receiver_events
begin
  select raise(abort, 'receiver: events are never deleted, or they would be applied again');
end;

-- What an event has waited for, the newest ten.
create table receiver_waits (
  event integer not null,
  since_ms integer not null,
  kind text not null,
  source text not null,
  account text not null,
  key text not null,
  operation text not null,
  primary key (event, since_ms)
) strict, without rowid;

create trigger receiver_waits_bound after insert on receiver_waits
begin
  delete from receiver_waits
  where event = new.event and since_ms < (
    select since_ms from receiver_waits
    where event = new.event order by since_ms desc limit 1 offset 9);
end;

create trigger receiver_events_unpark after update of state on receiver_events
when old.state = 'parked' and new.state <> 'parked'
begin
  insert into receiver_waits (event, since_ms, kind, source, account, key, operation)
  select event, since_ms, kind, source, account, key, operation
  from receiver_parked where event = old.id
  on conflict (event, since_ms) do update set
    kind = excluded.kind, source = excluded.source, account = excluded.account,
    key = excluded.key, operation = excluded.operation;
  delete from receiver_parked where event = old.id;
end;

create table receiver_conflicts (
  id integer primary key,
  event integer not null,
  -- over the canonical JSON with volatile fields masked, or the raw body where that is not JSON
  content_sha256 blob not null check (length(content_sha256) = 32),
  -- null: pruned or redacted
  body blob,
  content_type text not null,
  received_ms integer not null,
  deliveries integer not null check (deliveries > 0),
  request_id text not null,
  resolved_ms integer,
  -- a projected resource that the event would give another content
  resource integer,
  unique (event, content_sha256)
) strict;

create index receiver_conflicts_request on receiver_conflicts (request_id);
create index receiver_conflicts_open on receiver_conflicts (id) where resolved_ms is null;
"""

OPERATIONS = """
create table receiver_operations (
  source text not null check (source <> ''),
  account text not null,
  subject text not null check (subject <> ''),
  operation text not null check (operation <> ''),
  kind text not null check (
    kind in ('grant', 'reverse', 'spend', 'record', 'project', 'sql', 'call', 'send')),
  workspace text check (workspace <> ''),
  unit text check (unit <> ''),
  amount integer,
  -- of a reversal: the entry that it takes back, in the same source and account
  target_subject text,
  target_operation text,
  -- the event that claimed it; null for the app and the operator
  event integer,
  created_ms integer not null,
  primary key (source, account, subject, operation),
  check ((unit is null) = (amount is null)),
  check (amount is null or workspace is not null),
  check ((kind in ('grant', 'reverse', 'spend')) = (amount is not null)),
  check ((target_subject is null) = (target_operation is null)),
  check ((kind = 'reverse') = (target_operation is not null))
) strict, without rowid;

-- Kept for ever, as they are: without its claim an operation would be made again. A claim of a
-- key that is taken is skipped, whatever conflict clause asks for it to be replaced.
create trigger receiver_operations_once before insert on receiver_operations
when exists (
  select 1 from receiver_operations
  where source = new.source and account = new.account
    and subject = new.subject and operation = new.operation)
begin
  select raise(ignore);
end;

create trigger receiver_operations_no_update before update on receiver_operations
begin
  select raise(abort, 'receiver: a claim is never changed');
end;

create trigger receiver_operations_no_delete before delete on receiver_operations
begin
  select raise(abort, 'receiver: a claim is never deleted');
end;

create index receiver_operations_event on receiver_operations (event) where event is not null;
-- What has an amount is found by the ledger's index.
create index receiver_operations_workspace on receiver_operations (workspace, created_ms)
  where workspace is not null and amount is null;

create table receiver_names (
  kind text not null check (kind in ('identity', 'operation')),
  name text not null,
  since_ms integer not null,
  primary key (kind, name)
) strict, without rowid;

create table receiver_links (
  source text not null check (source <> ''),
  account text not null,
  customer text not null check (customer <> ''),
  workspace text not null check (workspace <> ''),
  created_ms integer not null,
  primary key (source, account, customer)
) strict, without rowid;

create index receiver_links_source on receiver_links (source, created_ms);
create index receiver_links_workspace on receiver_links (workspace, created_ms);

-- 0 is due now, whatever clock wrote the row.
create trigger receiver_links_release after insert on receiver_links
begin
  update receiver_events set state = 'pending', next_attempt_ms = 0
  where id in (
      select event from receiver_parked
      where kind = 'link' and source = new.source and account = new.account
        and key = new.customer and operation = '')
    and state = 'parked';
end;

create trigger receiver_links_release_moved after update on receiver_links
begin
  update receiver_events set state = 'pending', next_attempt_ms = 0
  where id in (
      select event from receiver_parked
      where kind = 'link' and source = new.source and account = new.account
        and key = new.customer and operation = '')
    and state = 'parked';
end;
"""

LEDGER = f"""
create table receiver_ledger (
  source text not null check (source <> ''),
  account text not null,
  subject text not null check (subject <> ''),
  operation text not null check (operation <> ''),
  workspace text not null check (workspace <> ''),
  unit text not null check (unit <> ''),
  amount integer not null check (amount <> 0 and amount between -{AMOUNT_MAX} and {AMOUNT_MAX}),
  created_ms integer not null check (created_ms > 0),
  -- of a reversal: the entry that it takes back, in the same source and account
  target_subject text,
  target_operation text,
  primary key (source, account, subject, operation),
  check ((target_subject is null) = (target_operation is null)),
  check (target_operation is null or amount < 0)
) strict, without rowid;

-- The rest of the key follows by itself. Begun with the source and account, it would be passed over
-- for the primary key, of which they choose next to nothing.
create index receiver_ledger_reversals on receiver_ledger (target_subject, target_operation)
  where target_operation is not null;
-- With all that a sum takes, and in the order of a listing.
create index receiver_ledger_workspace on receiver_ledger (workspace, unit, created_ms, amount);
create index receiver_ledger_operation on receiver_ledger (operation, created_ms);

create table receiver_balances (
  workspace text not null,
  unit text not null,
  balance integer not null,
  primary key (workspace, unit)
) strict, without rowid;

-- Before the insert, so that `or replace` and `on conflict` never get to decide.
create trigger receiver_ledger_guard before insert on receiver_ledger
begin
  select raise(abort, 'receiver: this business key is in the ledger already')
  where exists (
    select 1 from receiver_ledger
    where source = new.source and account = new.account
      and subject = new.subject and operation = new.operation);

  select raise(abort, 'receiver: this business key was claimed for something else')
  from receiver_operations
  where source = new.source and account = new.account
    and subject = new.subject and operation = new.operation
    and kind <> 'call'
    and (workspace is not new.workspace or unit is not new.unit or amount is not new.amount
      or target_subject is not new.target_subject
      or target_operation is not new.target_operation);

  select raise(abort, 'receiver: the balance does not cover this')
  where new.source = 'app' and new.amount < 0
    and new.amount + coalesce((
      select balance from receiver_balances
      where workspace = new.workspace and unit = new.unit), 0) < 0;
end;

create trigger receiver_ledger_reverse before insert on receiver_ledger
when new.target_operation is not null
begin
  select raise(abort, 'receiver: a reversal takes back what its target granted, and no more')
  where not exists (
    select 1 from receiver_ledger
    where source = new.source and account = new.account
      and subject = new.target_subject and operation = new.target_operation
      and workspace = new.workspace and unit = new.unit
      and amount + new.amount + (
        select coalesce(sum(amount), 0) from receiver_ledger
        where source = new.source and account = new.account
          and target_subject = new.target_subject and target_operation = new.target_operation
      ) >= 0);
end;

create trigger receiver_ledger_apply after insert on receiver_ledger
begin
  -- An entry written by the app or by hand claims its key, so that a late webhook finds it done.
  insert into receiver_operations (
    source, account, subject, operation, kind, workspace, unit, amount,
    target_subject, target_operation, event, created_ms)
  select
    new.source, new.account, new.subject, new.operation,
    case when new.target_operation is not null then 'reverse'
      when new.amount > 0 then 'grant' else 'spend' end,
    new.workspace, new.unit, new.amount,
    new.target_subject, new.target_operation, null, new.created_ms
  where not exists (
    select 1 from receiver_operations
    where source = new.source and account = new.account
      and subject = new.subject and operation = new.operation);

  insert into receiver_balances (workspace, unit, balance)
  values (new.workspace, new.unit, new.amount)
  on conflict (workspace, unit) do update set balance = balance + excluded.balance;
end;

-- Apart from the one above, and only where something waits: `in` makes its list, in a table of its
-- own, where that stays empty too.
create trigger receiver_ledger_release after insert on receiver_ledger
when exists (
  select 1 from receiver_parked
  where kind = 'entry' and source = new.source and account = new.account
    and key = new.subject and operation = new.operation)
begin
  update receiver_events set state = 'pending', next_attempt_ms = 0
  where id in (
      select event from receiver_parked
      where kind = 'entry' and source = new.source and account = new.account
        and key = new.subject and operation = new.operation)
    and state = 'parked';
end;

create trigger receiver_ledger_no_update before update on receiver_ledger
begin
  select raise(abort, 'receiver: ledger entries are never changed; write another');
end;

create trigger receiver_ledger_no_delete before delete on receiver_ledger
begin
  select raise(abort, 'receiver: ledger entries are never deleted; write another');
end;

create table receiver_records (
  source text not null check (source <> ''),
  account text not null,
  subject text not null check (subject <> ''),
  operation text not null check (operation <> ''),
  kind text not null check (kind <> ''),
  workspace text check (workspace <> ''),
  -- JSON
  data text not null,
  created_ms integer not null,
  primary key (source, account, subject, operation)
) strict, without rowid;

create index receiver_records_kind on receiver_records (kind, created_ms);
"""  # noqa: S608  a constant number

WORK = """
create table receiver_outbox (
  id integer primary key,
  -- business key, destination and name: what the other side may see once
  operation_key text not null unique,
  source text not null,
  account text not null,
  subject text not null,
  operation text not null,
  destination text not null,
  name text not null,
  state text not null check (state in ('pending', 'sent', 'review', 'dead', 'cancelled')),
  attempts integer not null check (attempts >= 0),
  next_attempt_ms integer check (next_attempt_ms is null or state = 'pending'),
  last_error text,
  -- JSON, rendered in the event's transaction
  body text not null,
  event integer,
  created_ms integer not null,
  settled_ms integer,
  lease_owner text,
  lease_until_ms integer,
  check ((settled_ms is not null) = (state in ('sent', 'dead', 'cancelled'))),
  check ((lease_owner is null) = (lease_until_ms is null)),
  check (lease_owner is null or state = 'pending')
) strict;

create index receiver_outbox_due on receiver_outbox (destination, next_attempt_ms)
  where next_attempt_ms is not null;
create index receiver_outbox_event on receiver_outbox (event) where event is not null;
create index receiver_outbox_kind on receiver_outbox (destination, state);
create index receiver_outbox_unfinished on receiver_outbox (state, id)
  where state in ('pending', 'review', 'dead');
create index receiver_outbox_counted on receiver_outbox (state, destination, source)
  where state in ('pending', 'review', 'dead');

-- One try at an event or at a message, counted before it is made.
create table receiver_attempts (
  id integer primary key,
  event integer,
  message integer,
  attempt integer not null check (attempt > 0),
  started_ms integer not null,
  duration_ms integer check (duration_ms >= 0),
  outcome text,
  error text,
  check ((event is null) <> (message is null)),
  check ((duration_ms is null) = (outcome is null))
) strict;

create unique index receiver_attempts_event on receiver_attempts (event, attempt)
  where event is not null;
create unique index receiver_attempts_message on receiver_attempts (message, attempt)
  where message is not null;
"""

# Unauthenticated traffic is counted, a row for a minute; of single requests only the newest are
# kept. store/rejections.py has the limits.
REJECTIONS = """
create table receiver_rejections (
  -- '' for every path that is no source's
  source text not null,
  reason text not null,
  minute_ms integer not null check (minute_ms % 60000 = 0),
  count integer not null check (count > 0),
  first_ms integer not null,
  last_ms integer not null,
  -- of the last one
  request_id text not null,
  detail text not null,
  primary key (source, minute_ms, reason)
) strict, without rowid;

create table receiver_rejected (
  id integer primary key,
  source text not null,
  reason text not null,
  request_id text not null,
  received_ms integer not null,
  method text not null,
  address text not null,
  -- JSON: the names without their values
  header_names text not null,
  -- null: not read to its end
  body_bytes integer,
  detail text not null,
  -- how late (above 0) or early a genuine one came
  skew_s integer,
  -- of a genuine one: over what its sender signed, but the time
  content_sha256 blob check (length(content_sha256) = 32),
  -- what judging it again takes; only of a genuine one, or where the config asks for it
  url text,
  headers text,
  body blob,
  -- the operator took it, as this event
  accepted_ms integer,
  event integer,
  check ((skew_s is not null) = (reason = 'expired')),
  check ((url is null) = (headers is null) and (url is null) = (body is null)),
  check ((accepted_ms is null) = (event is null)),
  check (accepted_ms is null or (reason = 'expired' and body is null))
) strict;

create index receiver_rejected_of on receiver_rejected (source, reason, id);
create index receiver_rejected_request on receiver_rejected (request_id);

-- How often each secret proved a delivery, by its reference.
create table receiver_secrets (
  source text not null,
  reference text not null check (reference <> ''),
  last_ms integer not null,
  count integer not null check (count > 0),
  primary key (source, reference)
) strict, without rowid;

create table receiver_audit (
  id integer primary key check (id > 0),
  at_ms integer not null,
  actor text not null check (actor <> ''),
  action text not null check (action <> ''),
  target text not null,
  reason text not null,
  -- JSON
  detail text not null
) strict;

create index receiver_audit_target on receiver_audit (target);

-- `or replace` would delete without asking the trigger below.
create trigger receiver_audit_no_replace before insert on receiver_audit
when exists (select 1 from receiver_audit where id = new.id)
begin
  select raise(abort, 'receiver: the audit log is only added to');
end;

-- A row far ahead would scatter what is added after it, and one beside the others be overlooked.
create trigger receiver_audit_at_the_end after insert on receiver_audit
when new.id > 1 and not exists (select 1 from receiver_audit where id = new.id - 1)
begin
  select raise(abort, 'receiver: the audit log is only added to, at its end');
end;

create trigger receiver_audit_no_update before update on receiver_audit
begin
  select raise(abort, 'receiver: the audit log is only added to');
end;

create trigger receiver_audit_no_delete before delete on receiver_audit
begin
  select raise(abort, 'receiver: the audit log is only added to');
end;

-- Fetched from the sender once and proved; the newest sixteen.
create table receiver_certificates (
  url text primary key check (url <> ''),
  pem text not null,
  fetched_ms integer not null
) strict;

create trigger receiver_certificates_bound after insert on receiver_certificates
begin
  delete from receiver_certificates where url not in (
    select url from receiver_certificates order by fetched_ms desc, url limit 16);
end;

create table receiver_health (
  id integer primary key check (id = 1),
  checked_ms integer not null
) strict;
"""

CARE = """
-- What is left of a payload that was pruned or redacted, to know a redelivery of it by.
create table receiver_forgotten (
  event integer primary key,
  -- of the canonical JSON without what the mask names; null where the body was not JSON
  content_sha256 blob check (length(content_sha256) = 32),
  -- JSON: the volatile fields
  mask text not null,
  why text not null check (why in ('pruned', 'redacted')),
  forgotten_ms integer not null
) strict;
"""

WATCH = """
-- What happened, counted in slots of ten minutes; slot 0 counts for ever. Rows are bounded: names
-- are those of sources and destinations, outcomes are our words, old slots go.
create table receiver_tallies (
  kind text not null check (kind in ('delivery', 'attempt', 'send')),
  name text not null,
  outcome text not null check (outcome <> ''),
  slot_ms integer not null check (slot_ms >= 0),
  count integer not null check (count > 0),
  last_ms integer not null,
  primary key (kind, slot_ms, name, outcome)
) strict, without rowid;

-- A condition that needs a person: opened when it was seen, closed when it was gone.
create table receiver_alerts (
  id integer primary key,
  name text not null check (name <> ''),
  -- the source, destination or type that it is about; '' for the whole
  subject text not null,
  words text not null,
  opened_ms integer not null,
  closed_ms integer,
  -- when a message about it was owed last
  sent_ms integer,
  check (closed_ms is null or closed_ms >= opened_ms)
) strict;

create unique index receiver_alerts_open on receiver_alerts (name, subject)
  where closed_ms is null;

-- The newest thousand, and whatever is open.
create trigger receiver_alerts_bound after insert on receiver_alerts
begin
  delete from receiver_alerts where id <= new.id - 1000 and closed_ms is not null;
end;

create table receiver_backups (
  id integer primary key,
  at_ms integer not null,
  path text not null check (path <> ''),
  bytes integer not null check (bytes > 0),
  -- null: not proved to open and to be whole
  verified_ms integer
) strict;

create table receiver_reconciles (
  id integer primary key,
  source text not null check (source <> ''),
  started_ms integer not null,
  -- null: under way, or cut off
  ended_ms integer,
  -- what the sender has and we do not
  gap integer check (gap >= 0),
  note text not null,
  about text not null check (about in ('events', 'books')),
  -- what it was asked for: only a run for the same goes on with one that was cut off
  asked text not null,
  -- how far it came, as JSON
  place text not null,
  owner text,
  lease_until_ms integer,
  check (ended_ms is null or gap is not null),
  check ((owner is null) = (lease_until_ms is null))
) strict;

create trigger receiver_reconciles_bound after insert on receiver_reconciles
begin
  delete from receiver_reconciles where id <= new.id - 1000;
end;

create index receiver_reconciles_source on receiver_reconciles (source, id);
"""

CAPTURED = """
-- The sources whose next handshake may bring a secret; the operator arms them, a secret disarms.
create table receiver_armed (
  source text primary key check (source <> ''),
  armed_ms integer not null,
  until_ms integer not null check (until_ms > armed_ms),
  actor text not null check (actor <> '')
) strict, without rowid;

-- Secrets that senders handed over. A row stays when its secret is forgotten: events name it.
create table receiver_captured (
  id integer primary key,
  source text not null check (source <> ''),
  secret blob check (length(secret) > 0),
  captured_ms integer not null,
  -- who handed it over, and in which request
  address text not null,
  request_id text not null,
  forgotten_ms integer,
  check ((secret is null) = (forgotten_ms is not null))
) strict;
"""

# Current state, as far as it is known, and what is still to be fetched.
PROJECTION = """
create table receiver_resources (
  id integer primary key,
  source text not null check (source <> ''),
  account text not null,
  kind text not null check (kind <> ''),
  resource_id text not null check (resource_id <> ''),
  -- '' where the rule names none; 'deleted' once it is
  state text not null,
  -- JSON object
  fields text not null,
  -- what the sender says of the order, if it does: only a higher one replaces this state
  version integer,
  -- the sender's time of the event that brought it, where a ranking decides
  event_time integer,
  terminal integer not null check (terminal in (0, 1)),
  deleted integer not null check (deleted in (0, 1)),
  -- 1: another content claims the same place; an open row of receiver_conflicts has it
  contested integer not null default 0 check (contested in (0, 1)),
  came_from text not null check (came_from in ('event', 'fetch')),
  -- the event that brought it, or that the fetch was made for; null: for none
  event integer,
  -- the fetch that brought it began when this event had been received; null: never fetched
  fetched_through integer,
  -- when this content was applied, and when it was last seen to be so
  updated_ms integer not null,
  checked_ms integer not null,
  unique (source, account, kind, resource_id),
  check (deleted = 0 or state = 'deleted')
) strict;

create index receiver_resources_event on receiver_resources (event) where event is not null;

create table receiver_fetches (
  id integer primary key,
  source text not null check (source <> ''),
  account text not null,
  kind text not null check (kind <> ''),
  resource_id text not null check (resource_id <> ''),
  -- the source's name: by its API and its rules
  endpoint text not null check (endpoint <> ''),
  state text not null check (state in ('pending', 'done', 'dead')),
  -- how often it was asked for, and how often when the last fetch began: one that began
  -- earlier does not answer a later question
  wanted integer not null check (wanted > 0),
  begun integer not null check (begun between 0 and wanted),
  -- counts the leases for ever: only the last may apply what it fetched
  fence integer not null check (fence >= 0),
  -- 1: the operator takes what the sender says, also over a final state
  mend integer not null check (mend in (0, 1)),
  attempts integer not null check (attempts >= 0),
  next_attempt_ms integer check (next_attempt_ms is null or state = 'pending'),
  last_error text,
  event integer,
  -- since when it is owed
  wanted_ms integer not null,
  settled_ms integer,
  -- the newest event when the fetch under way began
  through integer not null,
  lease_owner text,
  lease_until_ms integer,
  unique (source, account, kind, resource_id),
  check ((settled_ms is not null) = (state in ('done', 'dead'))),
  check ((lease_owner is null) = (lease_until_ms is null)),
  check (lease_owner is null or state = 'pending')
) strict;

create index receiver_fetches_due on receiver_fetches (endpoint, next_attempt_ms)
  where next_attempt_ms is not null;
create index receiver_fetches_unfinished on receiver_fetches (state, id)
  where state in ('pending', 'dead');

create trigger receiver_resources_no_delete before delete on receiver_resources
begin
  select raise(abort, 'receiver: resources are kept, the deleted ones too');
end;

create trigger receiver_resources_release after insert on receiver_resources
begin
  update receiver_events set state = 'pending', next_attempt_ms = 0
  where id in (
      select event from receiver_parked
      where kind = 'resource' and source = new.source and account = new.account
        and key = new.resource_id and operation = new.kind)
    and state = 'parked';
end;

create trigger receiver_resources_release_moved after update of checked_ms on receiver_resources
begin
  update receiver_events set state = 'pending', next_attempt_ms = 0
  where id in (
      select event from receiver_parked
      where kind = 'resource' and source = new.source and account = new.account
        and key = new.resource_id and operation = new.kind)
    and state = 'parked';
end;

create index receiver_conflicts_resource on receiver_conflicts (resource)
  where resource is not null and resolved_ms is null;

create trigger receiver_conflicts_contest after insert on receiver_conflicts
when new.resource is not null
begin
  update receiver_resources set contested = 1 where id = new.resource;
end;

create trigger receiver_conflicts_settle after update of resolved_ms on receiver_conflicts
when new.resource is not null
begin
  update receiver_resources
  set contested = exists (
    select 1 from receiver_conflicts where resource = new.resource and resolved_ms is null)
  where id = new.resource;
end;
"""

#: Append only: a step that was released is never edited.
STEPS = (EVENTS + OPERATIONS + LEDGER + WORK + REJECTIONS + CARE + WATCH + CAPTURED + PROJECTION,)


def version(db: apsw.Connection) -> int:
    """The schema version of the file: the number of steps it has seen, 0 for none."""
    known = db.execute("select 1 from sqlite_schema where name = 'receiver_schema'").get
    if not known:
        return 0
    found = db.execute("select max(version) from receiver_schema").get
    assert isinstance(found, int), "the table is created with its first row"
    return found


def fresh() -> apsw.Connection:
    """An empty file of the newest version, in memory, to compare with."""
    db = apsw.Connection(":memory:")
    migrate(db, 0)
    return db


def refuse_newer(found: int) -> None:
    """Raises NewerFile if a later Receiver wrote the file: we can't know its rules."""
    if found > len(STEPS):
        raise NewerFile(
            f"the file has schema version {found}, this Receiver knows {len(STEPS)}: "
            "install the newer version again, or, without what came since, stop the server, move "
            "the file away and `receiver restore` the copy beside it that ends in "
            "`.before-version-N`"
        )


def migrate(db: apsw.Connection, now_ms: int) -> None:
    """Bring the file to the newest version, one transaction a step.

    Raises NewerFile before anything is written.
    """
    while True:
        found = version(db)
        refuse_newer(found)
        if found == len(STEPS):
            return
        _take_step(db, now_ms)


def _take_step(db: apsw.Connection, now_ms: int) -> None:
    # The transaction begins before the version is read: another process may be migrating too.
    db.execute("begin immediate")
    try:
        found = version(db)
        refuse_newer(found)
        if found < len(STEPS):
            db.execute(
                """
                create table if not exists receiver_schema (
                  version integer primary key,
                  applied_ms integer not null
                ) strict
                """
            )
            db.execute(STEPS[found])
            db.execute(
                "insert into receiver_schema (version, applied_ms) values (?, ?)",
                (found + 1, now_ms),
            )
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise
