-- Users as of the end of a day: newest row of the change log over the previous catalogue.
-- Codes are append-only: known users keep theirs, new ones follow in the order of user_id.
-- Inputs: users, impressions, engagements (of the day), previous. Parameters: no_categorical, no_dense.
with newest as (
    select *
    from (select *, row_number() over (partition by user_id order by valid_from desc) as newest_first from users)
    where newest_first = 1
),
ids as (
    select user_id from previous
    union
    select user_id from newest
    union
    select user_id from impressions
    union
    select user_id from engagements
),
merged as (
    select
        ids.user_id,
        previous.user_code as old_code,
        coalesce(newest.categorical, previous.categorical, $no_categorical::bigint[]) as categorical,
        coalesce(newest.dense, previous.dense, $no_dense::float[]) as dense
    from ids
    left join previous on previous.user_id = ids.user_id
    left join newest on newest.user_id = ids.user_id
)
select
    cast(row_number() over (order by old_code nulls last, user_id) - 1 as integer) as user_code,
    user_id,
    categorical,
    dense
from merged
order by user_code
