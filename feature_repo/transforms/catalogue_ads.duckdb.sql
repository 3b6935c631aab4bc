-- Ads as of the end of a day: newest row of the change log over the previous catalogue.
-- Codes are append-only: known ads keep theirs, new ones follow in the order (created_us, ad_id).
-- Ids that were shown or engaged with but have no row in the change log get unknown attributes.
-- Inputs: ads, impressions, engagements (of the day), previous. Parameters: day_start_us, end_us, no_attributes, no_embedding.
with newest as (
    select *
    from (select *, row_number() over (partition by ad_id order by known_at desc) as newest_first from ads)
    where newest_first = 1
),
seen as (
    select ad_id, min(seen_us) as seen_us
    from (
        select ad_id, epoch_us(timestamp) as seen_us from impressions
        union all
        select item_id as ad_id, coalesce(epoch_us(timestamp), $day_start_us) as seen_us from engagements
    )
    group by ad_id
),
ids as (
    select ad_id from previous
    union
    select ad_id from newest
    union
    select ad_id from seen
),
merged as (
    select
        ids.ad_id,
        previous.ad_code as old_code,
        coalesce(epoch_us(newest.created_at), previous.created_us, seen.seen_us) as created_us,
        case when newest.ad_id is not null then epoch_us(newest.retired_at) else previous.retired_us end as retired_us,
        coalesce(newest.advertiser_id, previous.advertiser_id, 0) as advertiser_id,
        coalesce(newest.campaign_id, previous.campaign_id, 0) as campaign_id,
        coalesce(newest.objective, previous.objective, '') as objective,
        coalesce(newest.format, previous.format, '') as format,
        case when newest.ad_id is not null then coalesce(newest.category_path[1], 0) else coalesce(previous.category_1, 0) end as category_1,
        case when newest.ad_id is not null then coalesce(newest.category_path[2], 0) else coalesce(previous.category_2, 0) end as category_2,
        case when newest.ad_id is not null then coalesce(newest.category_path[3], 0) else coalesce(previous.category_3, 0) end as category_3,
        case when newest.ad_id is not null then coalesce(newest.bid, 0) else coalesce(previous.bid, 0) end as bid,
        coalesce(newest.attributes, previous.attributes, $no_attributes::float[]) as attributes,
        coalesce(newest.embedding, previous.embedding, $no_embedding::float[]) as embedding
    from ids
    left join previous on previous.ad_id = ids.ad_id
    left join newest on newest.ad_id = ids.ad_id
    left join seen on seen.ad_id = ids.ad_id
)
select
    cast(row_number() over (order by old_code nulls last, created_us, ad_id) - 1 as integer) as ad_code,
    ad_id,
    created_us,
    retired_us,
    coalesce(retired_us <= $end_us, false) as retired,
    advertiser_id,
    campaign_id,
    objective,
    format,
    category_1,
    category_2,
    category_3,
    cast(bid as float) as bid,
    attributes,
    embedding
from merged
order by ad_code
